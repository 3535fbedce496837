"""Changing the equations of a jaxpr, in whatever other equations hold them too."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.effects import axis_of, on_variables, with_axis
from shardmap._jax.primitives import SHARD_MAP, walked_axes
from shardmap._jax.types import Atom, Effect, Jaxpr, Value
from shardmap._jax.walk import jaxprs_in
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.tap import tap_p


def rewrite_jaxpr(
    jaxpr: Jaxpr,
    axis_name: Hashable,
    change: Callable[[Any, bool], Any],
    shadowed: bool = False,
    into_maps: bool = True,
    retype: Callable[[Any], Any] | None = None,
    renamed: Sequence[Hashable] | None = None,
) -> Any:
    """``jaxpr`` with ``change`` applied to each equation, the innermost first.

    Args:
      jaxpr: a jaxpr.
      axis_name: the axis that the change is about.
      change: takes an equation, and whether a map in between binds ``axis_name``
        again; gives the equation to have instead, or several.
      shadowed: the same for the whole jaxpr.
      into_maps: whether to change what maps hold, too, those of `jax.shard_map`
        included.
      retype: what to have instead of the aval of each variable.
      renamed: what the axis is called in the changed equations, none if they do not
        use it; None: they use it as before.
    """

    # Jaxprs are shared: a jitted function that is called twice has one.
    done: dict[tuple[int, bool], Any] = {}

    def rewrite(value: Value, shadowed: bool) -> Any:
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

    def rewrite_equations(jaxpr: Jaxpr, shadowed: bool) -> Any:
        equations = []
        for equation in jaxpr.eqns:
            params = equation.params
            bound: Collection[Hashable] | None = None
            if equation.primitive is spmap_p:
                bound = (params["axis_name"],)
            elif equation.primitive is SHARD_MAP:
                bound = walked_axes(equation)
            # A tap's jaxpr is there for JAX to look at; it is not run.
            if (into_maps or bound is None) and equation.primitive is not tap_p:
                inside = shadowed or (bound is not None and axis_name in bound)
                held = {key: rewrite(value, inside) for key, value in params.items()}
                gone, come = _changed_effects(jaxprs_in(params), jaxprs_in(held))
                effects = equation.effects - gone | come
                equation = equation.replace(params=held, effects=effects)
            changed = change(equation, shadowed)
            for new in changed if isinstance(changed, list) else [changed]:
                effects = rename(new.effects, shadowed)
                equations.append(new.replace(effects=effects))
        gone, come = _changed_effects(jaxpr.eqns, equations)
        effects = rename(jaxpr.effects, shadowed) - gone | come
        changed = jaxpr.replace(eqns=equations, effects=effects)
        return changed if retype is None else _with_avals(changed, retype)

    def rename(effects: Collection[Effect], shadowed: bool) -> Any:
        if renamed is None or shadowed:
            return effects
        return {
            new
            for effect in effects
            for new in (
                (with_axis(effect, name) for name in renamed)
                if axis_of(effect) == axis_name
                else (effect,)
            )
        }

    return rewrite(jaxpr, shadowed)


def _changed_effects(
    before: Sequence[Any], after: Sequence[Any]
) -> tuple[set[Any], set[Any]]:
    """The effects that equations, or jaxprs, have no more, and their new ones."""
    was, now = (
        {e for item in items for e in item.effects} for items in (before, after)
    )
    return was - now, now - was


def _with_avals(jaxpr: Jaxpr, retype: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with other avals for its variables, but not for those further in."""
    made: dict[Any, Any] = {}

    def new(atom: Atom) -> Any:
        if isinstance(atom, jex_core.Literal):
            # The value may have a type of its own.
            value, aval = np.asarray(atom.val), retype(atom.aval)
            return jex_core.Literal(value.item() if aval.weak_type else value, aval)
        if atom not in made:
            made[atom] = jex_core.Var(retype(atom.aval))
        return made[atom]

    def every(atoms: Sequence[Any]) -> list[Any]:
        return list(map(new, atoms))

    return jaxpr.replace(
        constvars=every(jaxpr.constvars),
        invars=every(jaxpr.invars),
        outvars=every(jaxpr.outvars),
        eqns=[
            equation.replace(
                invars=every(equation.invars),
                outvars=every(equation.outvars),
                effects=on_variables(equation.effects, new),
            )
            for equation in jaxpr.eqns
        ],
        effects=on_variables(jaxpr.effects, new),
    )
