"""Changing the equations of a jaxpr, in whatever other equations hold them too."""

from collections.abc import Callable, Hashable
from typing import Any

import jax.extend.core as jex_core

from shardmap.map.primitive import spmap_p


def rewrite_jaxpr(
    jaxpr: Any,
    axis_name: Hashable,
    change: Callable[[Any, bool], Any],
    shadowed: bool = False,
    into_maps: bool = True,
) -> Any:
    """``jaxpr`` with ``change`` applied to each equation, the innermost first.

    Args:
      jaxpr: a jaxpr.
      axis_name: the axis that the change is about.
      change: takes an equation, and whether a map in between binds ``axis_name``
        again; gives the equation to have instead.
      shadowed: the same for the whole jaxpr.
      into_maps: whether to change what maps hold, too.
    """

    def rewrite(value: Any, shadowed: bool) -> Any:
        if isinstance(value, tuple):
            items = [rewrite(item, shadowed) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, jex_core.Jaxpr):
            return rewrite_jaxpr(value, axis_name, change, shadowed, into_maps)
        if isinstance(value, jex_core.ClosedJaxpr):
            inner = rewrite_jaxpr(value.jaxpr, axis_name, change, shadowed, into_maps)
            return value.replace(jaxpr=inner)
        return value

    equations = []
    for equation in jaxpr.eqns:
        params = equation.params
        is_map = equation.primitive is spmap_p
        if into_maps or not is_map:
            inside = shadowed or (is_map and params["axis_name"] == axis_name)
            held = {key: rewrite(value, inside) for key, value in params.items()}
            equation = equation.replace(params=held)
        equations.append(change(equation, shadowed))
    # What remains of the effect of using the axis name would be out of date.
    effects = {e for e in jaxpr.effects if getattr(e, "name", None) != axis_name}
    return jaxpr.replace(eqns=equations, effects=jaxpr.effects if shadowed else effects)
