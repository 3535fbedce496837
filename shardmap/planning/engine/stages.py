"""A stage: the results it makes, the loops it runs over, and one shard of it."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.loop_classes import AxisKey
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.patterns import Members, Patterns
from shardmap.planning.engine.recipe import Recipe, needed, trace_back
from shardmap.planning.engine.rules import Cut, Factor, Origins, meet
from shardmap.planning.engine.slices import Box, Interval, pieces

SPREAD = 64
"""About how many shards of a stage are sampled to describe all of them."""


class Loop:
    """A loop of a stage over the pieces of an axis.

    Attributes:
      size: the length of the axes that it runs along.
      cuts: the cuts of these axes. All are added before ``pieces`` is read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.cuts: list[Cut] = []

    @functools.cached_property
    def pieces(self) -> list[Interval]:
        return pieces(meet(self.cuts).at, self.size)

    @functools.cached_property
    def lengths(self) -> Counter[int]:
        """Length -> the number of pieces of this length."""
        return Counter(stop - start for start, stop in self.pieces)

    @property
    def origins(self) -> Origins:
        return frozenset().union(*(cut.origins for cut in self.cuts))


class Result(NamedTuple):
    """A value that a stage makes.

    Attributes:
      value: the value.
      axes: the loop of each axis, None where it is whole.
      partial: the loops whose shards each have a part of it.
      combiner: how the parts combine; "insert" if there is nothing to combine.
    """

    value: Value
    axes: tuple[int | None, ...]
    partial: tuple[int, ...]
    combiner: Combiner


class Family(NamedTuple):
    """Results that the same shards make.

    Attributes:
      results: their numbers.
      loops: the loops to run over; the last one runs fastest.
      size: the number of shards.
    """

    results: frozenset[int]
    loops: tuple[int, ...]
    size: int


class ShardKey(NamedTuple):
    """The key of shards whose recipes may differ in positions only.

    Attributes:
      lengths: for each loop of their family, the loop and the length of their piece.
      written: for each result, whether they write it.
    """

    lengths: tuple[tuple[int, int], ...]
    written: tuple[bool, ...]


class _Loops:
    """The loops of a stage, by axis and by reduction.

    Args:
      analysis: the analysis.
      together: for each result, the reductions that make it partial.

    Attributes:
      named: (axis, repeat) -> loop. A result that has one axis twice has two loops.
      of_reduction: `Analysis.one_reduction` of reductions -> loop.
    """

    def __init__(self, analysis: Analysis, together: Sequence[Sequence[int]]) -> None:
        self._analysis = analysis
        self.named: dict[tuple[AxisKey, int], Loop] = {}
        self.of_reduction: dict[int, Loop] = {}
        for number in sorted({k for numbers in together for k in numbers}):
            # Reductions of one result get different loops.
            taken = {
                self.of_reduction[other]
                for numbers in together
                if number in numbers
                for other in numbers
                if other in self.of_reduction
            }
            reduction = analysis.reductions[number]
            loop = self._free(reduction.key, reduction.size, taken)
            loop.cuts += [each.cut for each in analysis.same_reductions[number]]
            self.of_reduction[number] = loop

    def _free(self, key: AxisKey, size: int, taken: Collection[Loop]) -> Loop:
        """Returns the first loop of an axis that is not taken; adds one if all are.

        ``x @ x.T`` has one axis of ``x`` twice in its result, which takes two loops.
        """
        for repeat in itertools.count():
            name = self._analysis.classes.find(key), repeat
            loop = self.named.setdefault(name, Loop(size))
            if loop not in taken:
                return loop
        raise AssertionError

    def of_axes(self, value: Value, reductions: Sequence[int]) -> list[Loop | None]:
        """The loop of each axis of a value that these reductions make partial."""
        taken = {self.of_reduction[number] for number in reductions}
        loops: list[Loop | None] = []
        whole: set[int] = set()
        if value in self._analysis.kept and (node := value.producer) is not None:
            rule = self._analysis.rules[node.number]
            whole = rule.whole_axes(node.outs.index(value))
        for axis, cut in enumerate(self._analysis.cuts[value]):
            if axis in whole:
                loops.append(None)
                continue
            loop = self._free((value.number, axis), value.shape[axis], taken)
            loop.cuts.append(cut)
            taken.add(loop)
            loops.append(loop)
        return loops


class Stage:
    """The results of one level, and the loops that compute them.

    Attributes:
      number: the level.
      results: the values that it makes.
      reads: the arguments, constants and values of earlier stages that it reads.
      loops: the loops that the results run over.
      families: the results that the same shards make.
      num_shards: the number of shards.
    """

    def __init__(
        self,
        number: int,
        analysis: Analysis,
        values: Sequence[Value],
        stops: Collection[Value],
    ) -> None:
        self.number = number
        self.analysis = analysis
        self.backwards, self.reads = needed(values, stops)
        self.loops: list[Loop] = []
        self._contracted: list[tuple[int, Factor, int]] = []
        self.results = self._results(values)
        self.patterns = Patterns(self._walk, self._count)
        self.families = self._families()
        self.num_shards = sum(family.size for family in self.families)

    def __repr__(self) -> str:
        types = [each.value.aval.str_short() for each in self.results[:4]]
        types += ["..."] * (len(self.results) > 4)
        return (
            f"<Stage {self.number}: {self.num_shards:,} shards make {', '.join(types)}>"
        )

    def spread(self, most: int = SPREAD) -> range:
        """The numbers of about ``most`` shards, evenly spread, as a sample."""
        return range(0, self.num_shards, max(1, self.num_shards // most))

    def _results(self, values: Sequence[Value]) -> list[Result]:
        """Finds the loops of the stage, and those of each result."""
        analysis, pending = self.analysis, self.analysis.pending
        reductions = [
            [analysis.one_reduction[k] for k in pending[v].reductions]
            if v in pending
            else []
            for v in values
        ]
        loops = _Loops(analysis, reductions)
        axes = list(map(loops.of_axes, values, reductions))
        # The loops of the results' axes come first.
        every = [loop for row in axes for loop in row if loop]
        every += loops.named.values()
        self.loops = [loop for loop in dict.fromkeys(every) if len(loop.pieces) > 1]
        place = {loop: number for number, loop in enumerate(self.loops)}
        self._contracted = [
            (reduction.node, reduction.factor, place[loop])
            for number, loop in loops.of_reduction.items()
            if loop in place
            for reduction in analysis.same_reductions[number]
        ]
        results = []
        for value, loops_of_value, numbers in zip(
            values, axes, reductions, strict=True
        ):
            summed = dict.fromkeys(loops.of_reduction[k] for k in numbers)
            partial = tuple(place[loop] for loop in summed if loop in place)
            combiner = pending[value].combiner if value in pending else "insert"
            cut = tuple(place.get(loop) if loop else None for loop in loops_of_value)
            results.append(Result(value, cut, partial, combiner))
        return results

    def _families(self) -> list[Family]:
        """Groups results: one whose loops another one has too is made with that.

        The same shards make both of ``x * 2, x.sum(0)``. Two results that share no loop
        have separate shards: together, the numbers of their shards would multiply.
        """
        loops_of = [{*r.axes, *r.partial} - {None} for r in self.results]
        largest = [s for s in loops_of if not any(s < other for other in loops_of)]
        families: list[Family] = []
        left = set(range(len(loops_of)))
        for loops in dict.fromkeys(map(frozenset, largest)):
            members = frozenset(k for k in left if loops_of[k] <= loops)
            left -= members
            ordered = tuple(k for k in range(len(self.loops)) if k in loops)
            size = math.prod(len(self.loops[k].pieces) for k in ordered)
            families.append(Family(members, ordered, size))
        return families

    def index(self, number: int) -> tuple[Family, dict[int, int]]:
        """The family of a shard, and the number of its piece of each loop."""
        for family in self.families:
            if number < family.size:
                break
            number -= family.size
        piece_of: dict[int, int] = {}
        for k in reversed(family.loops):
            number, piece_of[k] = divmod(number, len(self.loops[k].pieces))
        return family, piece_of

    def written(self, family: Family, index: Mapping[int, int]) -> tuple[bool, ...]:
        """For each result, whether this shard writes it."""
        # A result that a loop does not cut is written by the first shard along it.
        later = {k for k in family.loops if index[k]}
        return tuple(
            number in family.results and later <= {*result.axes, *result.partial}
            for number, result in enumerate(self.results)
        )

    def boxes(
        self, pieces: Mapping[int, Interval], written: Sequence[bool]
    ) -> list[Box | None]:
        """The box of each result that a shard writes, from its pieces; None if not."""
        return [
            tuple(
                (0, size) if k is None else pieces.get(k, (0, size))
                for k, size in zip(result.axes, result.value.shape, strict=True)
            )
            if is_written
            else None
            for result, is_written in zip(self.results, written, strict=True)
        ]

    def recipe(self, number: int) -> tuple[list[Box | None], Recipe]:
        """The box of each result that a shard writes, or None, and its recipe."""
        family, index = self.index(number)
        starts = [self.loops[k].pieces[index[k]][0] for k in family.loops]
        return self.patterns.recipe(self._key(family, index), starts)

    def members(self) -> Iterator[Members]:
        """Yields all shards, in groups of one pattern."""
        first = 0
        for family in self.families:
            loops = [self.loops[k] for k in family.loops]
            begins = [np.asarray([start for start, _ in n.pieces]) for n in loops]
            every = np.arange(family.size).reshape([len(n) for n in begins])
            for kinds in itertools.product(*map(_kinds, loops)):
                numbers = every[np.ix_(*kinds)].ravel()
                index = np.unravel_index(numbers, every.shape or 1)
                starts = np.zeros((len(numbers), len(loops)), np.int64)
                for k, begin in enumerate(begins):
                    starts[:, k] = begin[index[k]]
                at = {k: kind[0] for k, kind in zip(family.loops, kinds, strict=True)}
                groups = self.patterns.members(self._key(family, at), numbers, starts)
                yield from (
                    each._replace(numbers=first + each.numbers) for each in groups
                )
            first += family.size

    def _count(self, key: ShardKey) -> int:
        """The number of shards with pieces of these lengths, whatever they write."""
        return math.prod(self.loops[k].lengths[length] for k, length in key.lengths)

    def _key(self, family: Family, index: Mapping[int, int]) -> ShardKey:
        pieces = {k: self.loops[k].pieces[index[k]] for k in family.loops}
        lengths = tuple((k, stop - start) for k, (start, stop) in pieces.items())
        return ShardKey(lengths, self.written(family, index))

    def _walk(
        self, key: ShardKey, starts: Sequence[int]
    ) -> tuple[list[Box | None], Recipe]:
        """The boxes and the recipe of the shard with this key and these starts."""
        pieces: dict[int, Interval] = {
            k: (start, start + length)
            for (k, length), start in zip(key.lengths, starts, strict=True)
        }
        contracted: dict[int, dict[Factor, Interval]] = {}
        for node, factor, loop in self._contracted:
            if loop in pieces:
                contracted.setdefault(node, {})[factor] = pieces[loop]
        boxes = self.boxes(pieces, key.written)
        demands = [
            None if box is None else (result.value, box)
            for result, box in zip(self.results, boxes, strict=True)
        ]
        rules = self.analysis.rules
        return boxes, trace_back(self.backwards, rules, demands, self.reads, contracted)


def _kinds(loop: Loop) -> list[list[int]]:
    """Piece numbers, grouped by lengths; the first one is a group of its own."""
    kinds: dict[Hashable, list[int]] = {}
    for number, (start, stop) in enumerate(loop.pieces):
        kinds.setdefault((stop - start, not number), []).append(number)
    return list(kinds.values())


def stages_of(analysis: Analysis) -> list[Stage]:
    """The stages that compute a graph's outputs, in order."""
    graph = analysis.graph
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    inputs = {v for v in outputs if v.producer is None}
    values_of: dict[int, dict[Value, None]] = {}
    for value in [*outputs, *analysis.kept]:
        values_of.setdefault(analysis.level[value], {})[value] = None
    last = max([analysis.level[v] for v in outputs], default=0)
    stops = {*graph.inputs, *graph.constants}
    stages: list[Stage] = []
    for level in sorted(values_of):
        if level <= last:
            stages.append(Stage(level, analysis, list(values_of[level]), stops))
        stops.update(
            v for v in values_of[level] if v in analysis.kept and v not in inputs
        )
    return stages
