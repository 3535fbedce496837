"""Sums over an axis of what only its first element has.

The cotangent of a result that all elements share is given to the first of them. Where
it is then summed over the elements, as in the transpose of a sum, that is the cotangent
itself: nothing has to be sent.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex_core
from jax.extend.core.primitives import psum_p

from shardmap._jax.effects import has_external_effect, without_axis
from shardmap._jax.primitives import axis_names, with_axis_names
from shardmap._jax.types import Atom, Jaxpr, aval_of
from shardmap._jax.walk import effects_after
from shardmap.map.collectives.split import collectives_of, combines_all
from shardmap.map.primitives.first_element import first_element_p


def without_masked_sums(
    jaxpr: Jaxpr, axis_name: Hashable, in_axes: Sequence[int | None]
) -> Any:
    """``jaxpr`` with such sums replaced by what is summed.

    Args:
      jaxpr: the function of one element, linear in what is on the first element, as
        all is that transposition makes of cotangents.
      axis_name: the axis.
      in_axes: of the inputs; those with None are the same on all elements.
    """
    if not any(equation.primitive is first_element_p for equation in jaxpr.eqns):
        return jaxpr
    differ = {v for v, a in zip(jaxpr.invars, in_axes, strict=True) if a is not None}
    unmasked: dict[Any, Any] = {}  # What the first element has, by what is masked.
    summed: dict[Any, Any] = {}  # What stands for the result of a sum.
    new: list[Any] = []
    for old in jaxpr.eqns:
        equation = old.replace(invars=_replaced(old.invars, summed))
        differing = {v for v in _variables(equation.invars) if v in differ}
        is_masked = bool(differing) and differing <= unmasked.keys()
        held = collectives_of(equation, axis_name)
        if equation.primitive is psum_p and combines_all(equation, axis_name):
            others = tuple(n for n in axis_names(equation.params) if n != axis_name)
            if not is_masked:
                new.append(equation)
            elif others:
                params = with_axis_names(equation.params, others)
                effects = without_axis(equation.effects, axis_name)
                invars = _replaced(equation.invars, unmasked)
                new.append(
                    equation.replace(invars=invars, params=params, effects=effects)
                )
            else:
                [summed[equation.outvars[0]]] = _replaced(equation.invars, unmasked)
            continue
        is_pure = not (held or any(map(has_external_effect, equation.effects)))
        if differing or not is_pure:
            differ.update(equation.outvars)
        new.append(equation)
        if equation.primitive is first_element_p and held and not differing:
            [unmasked[equation.outvars[0]]] = equation.invars
        elif is_masked and not (
            held or any(map(has_external_effect, equation.effects))
        ):
            outvars = [jex_core.Var(aval_of(var)) for var in equation.outvars]
            invars = _replaced(equation.invars, unmasked)
            new.append(equation.replace(invars=invars, outvars=outvars))
            unmasked.update(zip(equation.outvars, outvars, strict=True))
    outvars = _replaced(jaxpr.outvars, summed)
    new = _needed(new, outvars)
    effects = effects_after(jaxpr, jaxpr.eqns, new)
    return jaxpr.replace(eqns=new, outvars=outvars, effects=effects)


def _variables(atoms: Iterable[Atom]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def _replaced(atoms: Iterable[Atom], values: Mapping[Any, Any]) -> list[Any]:
    is_literal = jex_core.Literal
    return [a if isinstance(a, is_literal) else values.get(a, a) for a in atoms]


def _needed(equations: Sequence[Any], results: Iterable[Atom]) -> list[Any]:
    """The equations that results need, and those that do something outside."""
    needed: list[Any] = []
    used = {*_variables(results)}
    for equation in reversed(equations):
        has_effect = any(map(has_external_effect, equation.effects))
        if has_effect or not used.isdisjoint(equation.outvars):
            needed.append(equation)
            used.update(_variables(equation.invars))
    return needed[::-1]
