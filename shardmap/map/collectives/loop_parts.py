"""A function of one element, cut where its final reductions over the axis are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.extend.core.primitives import axis_index_p

from shardmap._jax.types import Atom, Jaxpr
from shardmap.map.collectives.final_reductions import in_parts, is_in, part
from shardmap.map.collectives.split import is_collective, is_split_inside
from shardmap.map.collectives.split_axis import SplitAxis


class LoopParts(NamedTuple):
    """What runs for each element, and what runs once.

    Attributes:
      before: per element; gives what is to be reduced, then the results that need no
        reduction. Takes the element's index, then the operands.
      reductions: the equations that reduce.
      after: once; takes the reduced values, then the operands that are not mapped, and
        gives the results that need them, then what ``each_after`` takes.
      each_after: per element; takes that, then the operands that are not mapped, and
        gives the results that need a call of the host after the reductions.
      made_by: which of the three gives a result.
    """

    before: Any
    reductions: list[Any]
    after: Any
    each_after: Any
    made_by: list[str]

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
    found = in_parts(jaxpr, axis, unmapped, batch_size)

    def maker(result: Atom) -> str:
        if is_in(result, found.latest):
            return "each_after"
        return "after" if is_in(result, found.late) else "before"

    made_by = list(map(maker, found.results))
    early, late, latest = (
        [v for v, made in zip(found.results, made_by, strict=True) if made == by]
        for by in ("before", "after", "each_after")
    )
    there = found.latest | set(unmapped)
    # In order, each once.
    handed = dict.fromkeys(
        v
        for equation in found.each_after
        for v in equation.invars
        if not isinstance(v, jex_core.Literal) and v not in there
    )
    reduced = [equation.invars[0] for equation in found.reductions]
    return LoopParts(
        before=_given_index(
            part(jaxpr, jaxpr.invars, reduced + early, found.before), axis
        ),
        reductions=found.reductions,
        after=part(
            jaxpr,
            [*(e.outvars[0] for e in found.reductions), *unmapped],
            [*late, *handed],
            found.after,
        ),
        each_after=part(jaxpr, [*handed, *unmapped], latest, found.each_after),
        made_by=made_by,
    )


def _given_index(jaxpr: Jaxpr, axis: SplitAxis) -> Any:
    """``jaxpr`` with the element's index as its first operand, not asked for."""
    index = jex_core.Var(jax.core.ShapedArray((), np.dtype(np.int32)))
    equations, indices = [], set()
    for equation in jaxpr.eqns:
        asks = equation.primitive is axis_index_p
        if asks and is_collective(equation, axis.name):
            indices.update(equation.outvars)
        else:
            equations.append(equation)

    def renamed(atom: Atom) -> Any:
        return index if is_in(atom, indices) else atom

    return part(
        jaxpr,
        [index, *jaxpr.invars],
        list(map(renamed, jaxpr.outvars)),
        [e.replace(invars=list(map(renamed, e.invars))) for e in equations],
    )
