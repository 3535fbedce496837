"""Changing the equations of a jaxpr, in whatever other equations hold them too."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.effects import axis_of, on_variables, with_axis
from shardmap._jax.primitives import SHARD_MAP, walked_axes
from shardmap._jax.types import Atom, Effect, Equation, Jaxpr, Value
from shardmap._jax.walk import jaxprs_in, with_same_constants
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
    rewriter = _Rewriter(axis_name, change, into_maps, retype, renamed)
    return rewriter.rewrite(jaxpr, shadowed)


class _Rewriter:
    """What `rewrite_jaxpr` does to a jaxpr and to those in it."""

    def __init__(
        self,
        axis_name: Hashable,
        change: Callable[[Any, bool], Any],
        into_maps: bool,
        retype: Callable[[Any], Any] | None,
        renamed: Sequence[Hashable] | None,
    ) -> None:
        self._axis_name, self._change = axis_name, change
        self._into_maps, self._retype, self._renamed = into_maps, retype, renamed
        # Jaxprs are shared: a jitted function that is called twice has one.
        self._done: dict[tuple[int, bool], Any] = {}

    def rewrite(self, value: Value, shadowed: bool) -> Any:
        """A parameter of an equation, with the jaxprs in it rewritten."""
        if isinstance(value, tuple):
            items = [self.rewrite(item, shadowed) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, jex_core.Jaxpr):
            key = id(value), shadowed
            if key not in self._done:
                self._done[key] = self._rewrite_equations(value, shadowed)
            return self._done[key]
        if isinstance(value, jex_core.ClosedJaxpr):
            return value.replace(jaxpr=self.rewrite(value.jaxpr, shadowed))
        return value

    def _rewrite_equations(self, jaxpr: Jaxpr, shadowed: bool) -> Any:
        equations = []
        for equation in jaxpr.eqns:
            changed = self._change(self._rewrite_inside(equation, shadowed), shadowed)
            for new in changed if isinstance(changed, list) else [changed]:
                effects = self._rename(new.effects, shadowed)
                equations.append(new.replace(effects=effects))
        gone, come = changed_effects(jaxpr.eqns, equations)
        effects = self._rename(jaxpr.effects, shadowed) - gone | come
        changed = jaxpr.replace(eqns=equations, effects=effects)
        return changed if self._retype is None else _with_avals(changed, self._retype)

    def _rewrite_inside(self, equation: Equation, shadowed: bool) -> Equation:
        """An equation, with the jaxprs that it holds rewritten."""
        params = equation.params
        bound: Collection[Hashable] = ()
        is_map = equation.primitive in (spmap_p, SHARD_MAP)
        if equation.primitive is spmap_p:
            bound = (params["axis_name"],)
        elif is_map:
            bound = walked_axes(equation)
        # A tap's jaxpr is there for JAX to look at; it is not run.
        if (is_map and not self._into_maps) or equation.primitive is tap_p:
            return equation
        inside = shadowed or self._axis_name in bound
        held = {key: self.rewrite(value, inside) for key, value in params.items()}
        gone, come = changed_effects(jaxprs_in(params), jaxprs_in(held))
        return equation.replace(params=held, effects=equation.effects - gone | come)

    def _rename(self, effects: Collection[Effect], shadowed: bool) -> Any:
        if self._renamed is None or shadowed:
            return effects
        return {
            new
            for effect in effects
            for new in (
                (with_axis(effect, name) for name in self._renamed)
                if axis_of(effect) == self._axis_name
                else (effect,)
            )
        }


def changed_effects(
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

    return with_same_constants(
        jaxpr,
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
