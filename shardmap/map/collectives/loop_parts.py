"""A function of one element, cut where its final reductions over the axis are."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.extend.core as jex_core
import numpy as np

from shardmap._jax.collectives import AXIS_INDEX
from shardmap._jax.types import Atom, Equation, Jaxpr
from shardmap.map.collectives.reductions import REDUCTIONS
from shardmap.map.collectives.split import (
    is_collective,
    is_split_inside,
    uses_axis,
)
from shardmap.map.collectives.split_axis import SplitAxis


class LoopParts(NamedTuple):
    """What runs for each element, and what runs once.

    Attributes:
      before: per element; gives what is to be reduced, then the results that need no
        reduction. Takes the element's index, then the operands.
      reductions: the equations that reduce.
      after: once; takes the reduced values, then the operands that are not mapped, and
        gives the results that need them.
      is_after: which results ``after`` gives.
    """

    before: Any
    reductions: list[Any]
    after: Any
    is_after: list[bool]

    @property
    def reads_index(self) -> bool:
        """Whether an element asks for its index."""
        index = self.before.invars[0]
        reads = [self.before.outvars, *(e.invars for e in self.before.eqns)]
        is_read = any(atom is index for atoms in reads for atom in atoms)
        return is_read or self.reads_index_inside

    @property
    def reads_index_inside(self) -> bool:
        """The same for what its equations hold."""
        return any(map(is_split_inside, self.before.eqns))


class _Sorted(NamedTuple):
    """The equations of a function by when they run.

    Attributes:
      before: for each element.
      reductions: over the elements.
      after: once.
      late: the variables that need a reduced value.
      indices: the variables that are the element's index.
    """

    before: list[Any]
    reductions: list[Any]
    after: list[Any]
    late: set[Any]
    indices: set[Any]


def loop_parts(
    jaxpr: Jaxpr, axis: SplitAxis, in_axes: Sequence[int | None], batch_size: int
) -> LoopParts:
    """Cuts the function at its final reductions over the axis.

    Raises:
      ValueError: a collective whose result elements still need: all would have to be
        there at once.
    """
    unmapped = [
        var
        for var, in_axis in zip(jaxpr.invars, in_axes, strict=True)
        if in_axis is None
    ]
    found = _sort(jaxpr, axis, unmapped, batch_size)
    index = jex_core.Var(jax.core.ShapedArray((), np.dtype(np.int32)))

    def renamed(atom: Atom) -> Any:
        is_index = not isinstance(atom, jex_core.Literal) and atom in found.indices
        return index if is_index else atom

    is_after = [
        not isinstance(v, jex_core.Literal) and v in found.late for v in jaxpr.outvars
    ]
    early, late = (
        [v for v, after in zip(jaxpr.outvars, is_after, strict=True) if after is wanted]
        for wanted in (False, True)
    )
    reduced = [equation.invars[0] for equation in found.reductions]
    return LoopParts(
        before=jaxpr.replace(
            invars=[index, *jaxpr.invars],
            outvars=[renamed(v) for v in reduced + early],
            eqns=[e.replace(invars=list(map(renamed, e.invars))) for e in found.before],
            effects=_effects(found.before),
        ),
        reductions=found.reductions,
        after=jaxpr.replace(
            invars=[*(e.outvars[0] for e in found.reductions), *unmapped],
            outvars=late,
            eqns=found.after,
            effects=_effects(found.after),
        ),
        is_after=is_after,
    )


def _sort(
    jaxpr: Jaxpr, axis: SplitAxis, unmapped: Sequence[Any], batch_size: int
) -> _Sorted:
    def refuse(collective: Equation, where: str = "in the middle of") -> NoReturn:
        raise ValueError(
            f"batch_size={batch_size} is less than the {axis.block} elements of axis "
            f"{axis.name!r} on each device, but {collective.primitive} over that axis "
            f"stands {where} the function: what follows needs the values of all "
            f"elements at once. Leave batch_size out, give at least {axis.block}, or "
            "make the collective the last step."
        )

    before, reductions, after, late, indices = found = _Sorted([], [], [], set(), set())
    shared = set(unmapped)
    of_shared = []
    for equation in jaxpr.eqns:
        collectives = uses_axis(jaxpr.replace(eqns=[equation]), axis.name)
        direct = is_collective(equation, axis.name)
        variables = [v for v in equation.invars if not isinstance(v, jex_core.Literal)]
        if any(v in late for v in variables):
            for_all = all(v in late or v in shared for v in variables)
            if collectives or is_split_inside(equation) or not for_all:
                refuse(reductions[-1])
            after.append(equation)
            late.update(equation.outvars)
        elif direct and equation.primitive is AXIS_INDEX.primitive:
            indices.update(equation.outvars)
        elif direct and _is_plain_reduction(equation):
            reductions.append(equation)
            late.update(equation.outvars)
        elif collectives:
            place = "in the middle of" if direct else f"in a {equation.primitive} in"
            refuse(collectives[0], place)
        else:
            before.append(equation)
            inside = is_split_inside(equation) or equation.effects
            if not inside and all(v in shared for v in variables):
                of_shared.append(equation)
                shared.update(equation.outvars)
    after[:0] = _needed(of_shared, after)
    return found


def _needed(equations: Sequence[Any], by: Sequence[Any]) -> list[Any]:
    """Those of which others use the results."""
    needed = []
    used = {id(atom) for equation in by for atom in equation.invars}
    for equation in reversed(equations):
        if any(id(var) in used for var in equation.outvars):
            needed.append(equation)
            used.update(map(id, equation.invars))
    return needed[::-1]


def _effects(equations: Sequence[Any]) -> set[Any]:
    return {effect for equation in equations for effect in equation.effects}


def _is_plain_reduction(equation: Equation) -> bool:
    return (
        equation.primitive in REDUCTIONS
        and equation.params["axis_index_groups"] is None
        and not any(isinstance(axis, int) for axis in equation.params["axes"])
    )
