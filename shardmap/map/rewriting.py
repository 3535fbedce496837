"""Changing the equations of a jaxpr, in whatever other equations hold them too."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
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

    # Jaxprs are shared: a jitted function that is called twice has one.
    done: dict[tuple[int, bool], Any] = {}

    def rewrite(value: Any, shadowed: bool) -> Any:
        if isinstance(value, tuple):
            items = [rewrite(item, shadowed) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, jex_core.Jaxpr):
            key = id(value), shadowed
            if key not in done:
                done[key] = rewrite_equations(value, shadowed)
            return done[key]
        if isinstance(value, jex_core.ClosedJaxpr):
            return value.replace(jaxpr=rewrite(value.jaxpr, shadowed))
        return value

    def rewrite_equations(jaxpr: Any, shadowed: bool) -> Any:
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
        effects = {
            effect
            for effect in jaxpr.effects
            if shadowed or getattr(effect, "name", _NO_NAME) != axis_name
        }
        return jaxpr.replace(eqns=equations, effects=effects)

    return rewrite(jaxpr, shadowed)


_NO_NAME = object()


def under_mesh(jaxpr: Any, mesh: Any) -> Any:
    """``jaxpr`` as if it had been traced under ``mesh``, an abstract mesh.

    An equation remembers the mesh that it was traced under, and is lowered under it.
    """
    contexts: dict[Any, Any] = {}

    def change(equation: Any, shadowed: bool) -> Any:
        before = equation.ctx
        if id(before) not in contexts:
            with before.manager, jax.sharding.use_abstract_mesh(mesh):
                contexts[id(before)] = type(before)()
        return equation.replace(ctx=contexts[id(before)])

    # What maps hold is put under a mesh where they are lowered.
    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)
