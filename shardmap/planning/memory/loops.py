"""Ranks the loops of a function: what cutting each of them would save and move.

Axes that are one loop, index by index, form a class; see `Analysis.classes`. The cut of
a class is followed forward once. Then the bytes of every value are known for any number
of pieces.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.factors import BESIDE
from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.loop_classes import AxisKey
from shardmap.planning.engine.nodes import Node, Operand, Value
from shardmap.planning.engine.rules import UNCUT, Cut, Forward
from shardmap.planning.in_slices import cut_points
from shardmap.planning.lax import prefix
from shardmap.planning.lax.control import unroll
from shardmap.planning.lax.control.body import ALONG
from shardmap.planning.memory.held import Line, inside, lines_of

FOLLOWED = 16
"""The number of pieces whose cuts are followed."""

CLASSES = 32
"""The most classes that are ranked: those that the most bytes carry."""

FEW_STAGES = 64
"""So many stages cost no time of their own."""

STAGE_BYTES = 2**20
"""Each further stage takes about as long as moving so many bytes."""

MOST_PIECES = 2**16
"""The most pieces of an axis, which are listed."""

Axes: TypeAlias = frozenset[tuple[int, int]]
"""Axes that are cut, as (number of the value in `Uncut.values`, axis)."""


class Uncut(NamedTuple):
    """A function before it is cut.

    Attributes:
      analysis: of its graph, without cuts.
      values: the values at which cuts can begin: its arguments, then values inside.
      in_loops: whether shards are bodies of loops, whose arguments and results exist.
    """

    analysis: Analysis
    values: Sequence[Value]
    in_loops: bool

    def classes(self) -> list[Axes]:
        """The axes of each class that can be cut, the most bytes first."""
        find = self.analysis.classes.find
        axes: dict[AxisKey, set[tuple[int, int]]] = {}
        for k, value in enumerate(self.values):
            for axis, length in enumerate(value.shape):
                if length > 1:
                    axes.setdefault(find((value.number, axis)), set()).add((k, axis))
        carried = dict.fromkeys(axes, 0)
        graph = self.analysis.graph
        for value in [*graph.inputs, *(v for node in graph.nodes for v in node.outs)]:
            for root in {find((value.number, axis)) for axis in range(value.aval.ndim)}:
                if root in carried:
                    carried[root] += nbytes(value)
        ranked = sorted(carried, key=lambda root: -carried[root])
        return [frozenset(axes[root]) for root in ranked]


class Followed:
    """A cut of some axes that is followed through a function.

    Args:
      uncut: the function.
      axes: the axes.
      partial: whether axes that are summed over are cut.

    Attributes:
      most: the most pieces.
    """

    def __init__(self, uncut: Uncut, axes: Axes, partial: bool) -> None:
        longest = max((uncut.values[k].shape[axis] for k, axis in axes), default=1)
        self.most = min(longest, MOST_PIECES)
        self._uncut, self.axes, self._partial = uncut, axes, partial
        self._analysis = uncut.analysis
        find = self._analysis.classes.find
        self._roots = {find((uncut.values[k].number, axis)) for k, axis in sorted(axes)}
        self._cuts: dict[Operand, list[Cut]] = {}
        # The values that are needed whole though a cut reaches them.
        self._whole: set[Operand] = set()
        self._pass: dict[Operand, int] = {}
        self._divided: set[Node] = set()
        self._parts = 0  # The bytes of sums over cut axes.
        self._lines = lines_of(self._analysis.graph, self._analysis.rules)
        self.passes = 1
        for value in self._analysis.graph.inputs:
            self._begin(value)
        for node in self._analysis.graph.nodes:
            self._visit(node)

    def _begin(self, value: Value) -> None:
        """Cuts the axes of a value that belong to the classes."""
        find = self._analysis.classes.find
        row = [
            Cut(cut_points(FOLLOWED, size), False, frozenset({(0, 0)}))
            if size > 1 and find((value.number, axis)) in self._roots
            else UNCUT
            for axis, size in enumerate(value.shape)
        ]
        if any(cut.at for cut in row):
            self._cuts[value] = row

    def _visit(self, node: Node) -> None:
        before = max((self._pass.get(x, 0) for x in node.ins), default=0)
        if not any(x in self._cuts for x in node.ins):
            for out in node.outs:
                self._pass[out] = before
                self._begin(out)
            return
        rows = [self._cuts.get(x) or [UNCUT] * len(x.shape) for x in node.ins]
        forward: Forward = self._analysis.rules[node.number].forward(rows)
        ended = [
            each
            for each in forward.lost
            if each.origins and each.reason != BESIDE and not each.reason.in_stages
            # Pieces of the steps of a loop are stages that read their own rows.
            if each.reason != ALONG or not self._partial
        ]
        contracted = bool(forward.contracted) and self._partial
        is_whole = bool(ended) or (bool(forward.contracted) and not self._partial)
        self._divided.add(node)
        after = before
        if ended and node.primitive in unroll.PRIMITIVES:
            after += int(node.params.get("length", 1))
        elif ended and node.primitive in prefix.STAGES:
            # It becomes stages: its result stays cut.
            after += 1
            self._cuts |= {out: row for out, row in zip(node.outs, rows, strict=False)}
        elif is_whole:
            self._whole |= {*node.ins, *node.outs}
            after += 1
        for out, row in zip(node.outs, forward.outs, strict=True):
            if any(cut.at for cut in row):
                self._cuts[out] = row
            self._pass[out] = after + contracted
            self._parts += contracted * nbytes(out)
        if any(out in self._cuts for out in node.outs) or contracted:
            self.passes = max(self.passes, after + 1)

    def _cut_sizes(self, value: Operand) -> list[int]:
        """The lengths of the axes that are cut."""
        row = () if value in self._whole else self._cuts.get(value, ())
        return [n for n, cut in zip(value.shape, row, strict=False) if cut.at]

    def _share(self, value: Operand, count: int) -> float:
        """The part of a value that the largest shard has, in so many pieces."""
        return math.prod(math.ceil(n / count) / n for n in self._cut_sizes(value))

    def held(self, count: int) -> float:
        """About the bytes that a shard holds, in so many pieces."""
        graph, in_loops = self._analysis.graph, self._uncut.in_loops
        results = [v for v in dict.fromkeys(graph.outputs) if isinstance(v, Value)]
        shares = {v: self._share(v, count) for v in [*graph.inputs, *results]}
        outside = sum(
            nbytes(value) * share
            for value, share in shares.items()
            if not in_loops or (share < 1 and count > 1)
        )

        def size_of(value: Any) -> float:
            return 0 if value in shares else nbytes(value) * self._share(value, count)

        def inner(line: Line) -> float:
            return inside(line.node) / (count if line.node in self._divided else 1)

        return outside + self._lines.most(size_of, inner)[0]

    def fewest(self, memory: float) -> int | None:
        """About the fewest pieces with which a shard fits; None: there are none."""
        below, count = 1, min(2, self.most)
        while self.held(count) > memory:
            if count >= self.most:
                return None
            below, count = count, min(4 * count, self.most)
        while count - below > max(1, count // 32):
            middle = (below + count) // 2
            if self.held(middle) <= memory:
                count = middle
            else:
                below = middle
        return count

    def moved(self, count: int) -> float:
        """About the bytes that all shards read and return, in so many pieces."""
        cut_axes = [sum(bool(cut.at) for cut in row) for row in self._cuts.values()]
        shards = float(count) ** max(cut_axes, default=1)
        graph = self._analysis.graph

        def times(value: Value) -> float:
            return shards / math.prod(min(n, count) for n in self._cut_sizes(value))

        reads = sum(nbytes(value) * max(times(value), 1) for value in graph.inputs)
        results = sum(nbytes(v) for v in graph.outputs if isinstance(v, Value))
        stages = max(self._pass.values(), default=0)
        overhead = STAGE_BYTES * max(stages - FEW_STAGES, 0)
        parts = self._parts * (count - 1)
        return reads * self.passes + results + parts + overhead


def ranked(
    uncut: Uncut,
    given: Axes,
    classes: Sequence[Axes],
    memory: int,
    partial: bool,
    times_read: Callable[[Axes, int], float],
) -> list[Axes]:
    """Axes to cut: those that are given and one class more, the most promising first.

    First come those that fit, by what their shards move, then the others, by what they
    hold.

    Args:
      times_read: returns how often shards read each chunk, for axes and pieces.
    """
    more = dict.fromkeys(given | axes for axes in classes[:CLASSES])

    def rank(followed: Followed) -> tuple[bool, float]:
        if (count := followed.fewest(memory)) is None:
            return True, followed.held(followed.most)
        return False, followed.moved(count) * times_read(followed.axes, count)

    ways = [Followed(uncut, axes, partial) for axes in more if axes != given]
    return [followed.axes for followed in sorted(ways, key=rank)]
