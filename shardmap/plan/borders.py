"""Moves cuts to the borders of the cells that results are written to.

A file of zarr is written as a whole: where two shards had parts of one, all that they
make would have to be written by one process. Cuts that were asked for as a number of
pieces, or by memory, may lie a little to the side.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shardmap._jax.types import PyTree
from shardmap.arrays.sources.registry import away
from shardmap.plan.engine.rules import Cut, Origins
from shardmap.plan.engine.stages import Loop
from shardmap.plan.in_slices import Counted
from shardmap.plan.memory.plan_peak import plan_peak
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.out import outputs

Cells: TypeAlias = Mapping[int, Sequence[int]]
"""The lengths of the cells of what an output is written to, per axis."""


class Borders:
    """The cuts of one plan, moved for what its results are written to.

    Args:
      cut_program: the plan as it was asked for.
      memory: the bytes that a shard may hold.
    """

    def __init__(self, cut_program: CutProgram, memory: int | None = None) -> None:
        self._made, self._memory = cut_program, memory
        self._known: dict[Any, CutProgram] = {}

    def moved(self, out: PyTree) -> CutProgram:
        """The plan, of which as many pieces as before end where cells of ``out`` do.

        It is the plan as it was if its cuts may not be moved, or pieces are shorter
        than cells.
        """
        if out is None or self._made.again is None:
            return self._made
        found = [cells_of(array) for _, array in outputs(self._made, out)]
        cells = {k: each for k, each in enumerate(found) if each}
        key = tuple(cells.items())
        if key not in self._known:
            self._known[key] = self._moved(cells)
        return self._known[key]

    def _moved(self, cells: Cells) -> CutProgram:
        made, cuts = self._made, [list(row) for row in self._made.cuts]
        crossed = list(_crossed(made, cells))
        for group in _together(made):
            own = [(loop, cell) for loop, cell in crossed if loop.origins & group]
            points = {cuts[leaf][axis].at for leaf, axis in group}
            if len(points) > 1 or not own:
                continue
            (at,) = points
            borders = _nearest(at, own)
            if not isinstance(at, Counted) or len(borders) < len(at):
                continue
            for leaf, axis in group:
                size = made.graph.inputs[leaf].shape[axis]
                if 0 < borders[0] and borders[-1] < size:
                    cuts[leaf][axis] = Cut(borders, False, cuts[leaf][axis].origins)
        if made.again is None or cuts == [list(row) for row in made.cuts]:
            return made
        found = made.again(cuts)
        if len(list(_crossed(found, cells))) >= len(crossed):
            return made
        if self._memory is not None and plan_peak(found).bytes > self._memory:
            return made
        return found


def _nearest(at: Sequence[int], loops: Sequence[tuple[Loop, int]]) -> Counted:
    """The points of a cut, moved so that the pieces of loops end at cells."""
    # The pieces of ``x[1:]`` lie one before those of ``x``.
    shifts = {
        stop - point
        for loop, _ in loops
        for (_, stop), point in zip(loop.pieces, at, strict=False)
    }
    if len(shifts) > 1:
        return Counted()
    (shift,) = shifts
    step = math.lcm(*(cell for _, cell in loops))
    return Counted(sorted({round_to(p + shift, step) - shift for p in at}))


def round_to(point: int, step: int) -> int:
    """The multiple of a step that is nearest.

    >>> round_to(13, 8), round_to(12, 8), round_to(3, 8)
    (16, 16, 0)
    """
    return (2 * point + step) // (2 * step) * step


def cells_of(array: Any) -> tuple[int, ...] | None:
    """The lengths of the cells that are written as a whole, None if there are none."""
    sink = None if array is None else away(array)
    cells = getattr(array, "chunks", None) if sink is None else sink.grain
    if not isinstance(cells, tuple | list) or len(cells) != len(array.shape):
        return None
    if not all(isinstance(cell, int) for cell in cells) or max(cells, default=1) < 2:
        return None
    return tuple(cells)


def _crossed(made: CutProgram, cells: Cells) -> Iterator[tuple[Loop, int]]:
    """The loops whose pieces end inside of cells, with the lengths of these."""
    lengths = {made.graph.outputs[k]: found for k, found in cells.items()}
    for stage in made.stages:
        for result in stage.results:
            pairs = zip(result.axes, lengths.get(result.value, ()), strict=False)
            for k, cell in pairs:
                if k is not None and any(
                    stop % cell for _, stop in stage.loops[k].pieces[:-1]
                ):
                    yield stage.loops[k], cell


def _together(made: CutProgram) -> list[Origins]:
    """Groups of axes of arguments that share a loop, and so have the same cuts."""
    groups: list[Origins] = []
    for stage in made.stages:
        for loop in stage.loops:
            apart = [group for group in groups if not group & loop.origins]
            met = [group for group in groups if group & loop.origins]
            groups = [*apart, frozenset().union(loop.origins, *met)]
    return [group for group in groups if group]
