"""The equations of one element's function by when they run, in a loop over elements.

What needs only reductions over the axis, and what all elements have alike, runs once,
when all elements are through.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax.extend.core as jex_core
from jax.extend.core.primitives import axis_index_p

from shardmap._jax.collectives import axis_names, with_axis_names
from shardmap._jax.effects import (
    NO_AXIS,
    axis_of,
    happens_outside,
    without_axis,
    without_references,
)
from shardmap._jax.types import Atom, Equation, Jaxpr, aval_of
from shardmap.map.collectives.inline_calls import inline_calls
from shardmap.map.collectives.split import is_collective, uses_axis
from shardmap.map.collectives.split_axis import SplitAxis
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import insert_axis, spmap_p


class InParts(NamedTuple):
    """The equations of a function by when they run.

    Attributes:
      before: for each element.
      reductions: over the elements.
      after: once.
      each_after: for each element again, as it calls the host, or follows on that.
      shared: the variables that all elements have alike, and that need no reduction.
      late: those that need one.
      latest: those of ``each_after``.
      results: what the function gives.
    """

    before: list[Any]
    reductions: list[Any]
    after: list[Any]
    each_after: list[Any]
    shared: set[Any]
    late: set[Any]
    latest: set[Any]
    results: list[Any]


def in_parts(
    jaxpr: Jaxpr, axis: SplitAxis, shared: Sequence[Any], batch_size: int
) -> InParts:
    """Sorts the equations of a function by its final reductions over the axis.

    Args:
      jaxpr: what one element computes.
      axis: the axis.
      shared: the operands that all elements have alike.
      batch_size: how many of them run at once, for messages.

    Raises:
      ValueError: a collective whose result elements still need: all would have to be
        there at once.
    """
    sorter = _Sorter(jaxpr, axis, shared, batch_size)
    return sorter.sorted()


def refuse(
    axis: SplitAxis, batch_size: int, collective: Equation, where: str
) -> NoReturn:
    """Says that a loop over elements cannot have a collective there."""
    raise ValueError(
        f"batch_size={batch_size} is less than the {axis.block} elements of axis "
        f"{axis.name!r} on each device, but {collective.primitive} over that axis "
        f"stands {where} the function: what follows needs the values of all "
        f"elements at once. Leave batch_size out, give at least {axis.block}, or "
        "make the collective the last step."
    )


def part(
    jaxpr: Jaxpr, operands: Sequence[Any], results: Sequence[Any], eqns: Sequence[Any]
) -> Any:
    """Some equations of ``jaxpr``, as a jaxpr."""
    effects = {effect for equation in eqns for effect in equation.effects}
    return jaxpr.replace(
        invars=list(operands), outvars=list(results), eqns=list(eqns), effects=effects
    )


def is_in(atom: Atom, variables: set[Any]) -> bool:
    """Whether it is one of the variables, and no literal."""
    return not isinstance(atom, jex_core.Literal) and atom in variables


class _Carried(NamedTuple):
    """A value that goes into a map, or comes out of it.

    Attributes:
      inside: the variable of one element.
      axis: where all elements are, outside; None: it has no such axis.
      outside: the variable of all.
    """

    inside: Any
    axis: int | None
    outside: Any


class _Sorter:
    """Puts one equation after the other where it runs."""

    def __init__(
        self, jaxpr: Jaxpr, axis: SplitAxis, shared: Sequence[Any], batch_size: int
    ) -> None:
        self._jaxpr, self._axis, self._batch_size = jaxpr, axis, batch_size
        self._found = InParts([], [], [], [], set(shared), set(), set(), [])
        self._of_shared: list[Any] = []

    def sorted(self) -> InParts:
        # What a function calls may end with a reduction.
        jaxpr = inline_calls(self._jaxpr, lambda equation: bool(self._asked(equation)))
        for equation in jaxpr.eqns:
            self._add(equation)
        found = self._found
        needed = _needed(self._of_shared, [*found.after, *found.each_after])
        return found._replace(after=needed + found.after, results=list(jaxpr.outvars))

    def _asked(self, equation: Equation) -> list[Any]:
        """The collectives over the axis, in an equation, that ask other elements."""
        used = uses_axis(self._jaxpr.replace(eqns=[equation]), self._axis.name)
        return [e for e in used if e.primitive is not axis_index_p]

    def _add(self, equation: Equation) -> None:
        found, asked = self._found, self._asked(equation)
        direct = is_collective(equation, self._axis.name)
        if any(is_in(v, found.late) for v in equation.invars):
            self._add_late(equation)
        elif direct and _is_plain_reduction(equation):
            found.reductions.append(equation)
            found.late.update(equation.outvars)
        elif asked and equation.primitive is spmap_p:
            for each in self._cut(equation):
                self._add(each)
        elif asked:
            place = "in the middle of" if direct else f"in a {equation.primitive} in"
            refuse(self._axis, self._batch_size, asked[0], place)
        else:
            found.before.append(equation)
            # Effects, as to ask for the element's index, may give anything.
            others = (NO_AXIS, self._axis.name)
            if all(axis_of(effect) not in others for effect in equation.effects) and (
                all(map(self._is_shared, equation.invars))
            ):
                self._of_shared.append(equation)
                found.shared.update(equation.outvars)

    def _is_shared(self, atom: Atom) -> bool:
        return isinstance(atom, jex_core.Literal) or atom in self._found.shared

    def _add_late(self, equation: Equation) -> None:
        found = self._found
        if uses_axis(self._jaxpr.replace(eqns=[equation]), self._axis.name) or not all(
            self._is_shared(v) or v in found.late for v in equation.invars
        ):
            last = found.reductions[-1]
            refuse(self._axis, self._batch_size, last, "in the middle of")
        found.late.update(equation.outvars)
        if any(map(happens_outside, equation.effects)) or any(
            is_in(v, found.latest) for v in equation.invars
        ):
            found.each_after.append(equation)
            found.latest.update(equation.outvars)
        else:
            found.after.append(equation)

    def _cut(self, equation: Equation) -> list[Any]:
        """A map as what it does before reductions over the axis, these, and the rest.

        What is reduced over the map's own axis too, is along that one at once.
        """
        params, inner = equation.params, equation.params["call_jaxpr"]
        given = _carried(inner.invars, params["in_axes"], equation.invars)
        shared = [each for each in given if self._is_shared(each.outside)]
        inside = [each.inside for each in shared]
        parts = in_parts(inner, self._axis, inside, self._batch_size)
        results = _carried(parts.results, params["out_axes"], equation.outvars)

        before, partial, reductions, reduced = list(parts.before), [], [], []
        for each in parts.reductions:
            own, value, others = _along(each, params["axis_name"])
            before += own
            axis = None if own else 0
            [result] = each.outvars
            aval = insert_axis(aval_of(result), params["axis_size"], axis)
            some, all_of_them = jex_core.Var(aval), jex_core.Var(aval)
            partial.append(_Carried(value, axis, some))
            reductions.append(others.replace(invars=[some], outvars=[all_of_them]))
            reduced.append(_Carried(result, axis, all_of_them))

        early = [each for each in results if not is_in(each.inside, parts.late)]
        late = [each for each in results if is_in(each.inside, parts.late)]
        return [
            _map(equation, before, given, partial + early),
            *reductions,
            _map(equation, parts.after + parts.each_after, reduced + shared, late),
        ]


def _carried(
    inside: Sequence[Any], axes: Sequence[int | None], outside: Sequence[Any]
) -> list[_Carried]:
    return list(map(_Carried, inside, axes, outside))


def _along(reduction: Equation, name: Any) -> tuple[list[Any], Any, Any]:
    """A reduction as one along an axis, if it is, and one along the others.

    Returns:
      The first one, or none; what is to be reduced by the second; the second.
    """
    [value], names = reduction.invars, axis_names(reduction.params)
    own: list[Any] = []
    if name in names:
        here = jex_core.Var(aval_of(value))
        own = [
            reduction.replace(
                outvars=[here],
                params=with_axis_names(reduction.params, (name,)),
                effects={e for e in reduction.effects if axis_of(e) == name},
            )
        ]
        value = here
    others = reduction.replace(
        params=with_axis_names(reduction.params, tuple(n for n in names if n != name)),
        effects=without_axis(reduction.effects, name),
    )
    return own, value, others


def _map(
    equation: Equation,
    eqns: Sequence[Any],
    operands: Sequence[_Carried],
    results: Sequence[_Carried],
) -> Any:
    """The map of other equations."""
    params = equation.params
    jaxpr = part(
        params["call_jaxpr"],
        [each.inside for each in operands],
        [each.inside for each in results],
        eqns,
    )
    return equation.replace(
        invars=[each.outside for each in operands],
        outvars=[each.outside for each in results],
        params=params
        | {
            "call_jaxpr": jaxpr,
            "in_axes": tuple(each.axis for each in operands),
            "out_axes": tuple(each.axis for each in results),
        },
        effects=without_references(without_axis(jaxpr.effects, params["axis_name"])),
    )


def _needed(equations: Sequence[Any], by: Sequence[Any]) -> list[Any]:
    """Those of which others use the results."""
    needed = []
    used = {id(atom) for equation in by for atom in equation.invars}
    for equation in reversed(equations):
        if any(id(var) in used for var in equation.outvars):
            needed.append(equation)
            used.update(map(id, equation.invars))
    return needed[::-1]


def _is_plain_reduction(equation: Equation) -> bool:
    return (
        COLLECTIVES[equation.primitive].is_reduction
        and equation.params.get("axis_index_groups") is None
        and not any(isinstance(axis, int) for axis in axis_names(equation.params))
    )
