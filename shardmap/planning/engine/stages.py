"""A stage: the results it makes, the loops it runs over, and one shard of it."""

import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmap.planning.engine.analysis import Analysis, LoopName, Pending, free_loop
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Node, Value
from shardmap.planning.engine.patterns import Members, Patterns
from shardmap.planning.engine.recipe import Recipe, needed, trace_back
from shardmap.planning.engine.rules import Cut, Factor, Origins, meet
from shardmap.planning.engine.slices import Box, Interval, pieces

SPREAD = 64
"""About how many shards of a stage are sampled to describe all of them."""


class Loop:
    """A loop over the pieces of axes of one size, whose cuts are added first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.cuts: list[Cut] = []

    @functools.cached_property
    def pieces(self) -> list[Interval]:
        return pieces(meet(self.cuts).at, self.size)

    @property
    def origins(self) -> Origins:
        return frozenset().union(*(cut.origins for cut in self.cuts))


class Result(NamedTuple):
    """A value that a stage makes.

    Attributes:
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


ShardKey: TypeAlias = tuple[tuple[tuple[int, int], ...], tuple[bool, ...]]
"""Equal for shards whose recipes may differ in positions only: the length of their
piece of each loop, and whether they write each result."""


class Stage:
    """The results of one level, and the loops that compute them.

    Attributes:
      reads: the arguments, constants and values of earlier stages that it reads.
      families: the results that the same shards make.
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
        self.backwards, self.reads = needed(analysis.graph, values, stops)
        self.loops: list[Loop] = []
        self._contracted: list[tuple[Node, Factor, int]] = []
        self.results = self._results(values)
        self.patterns = Patterns(self._walk)
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
        analysis, named = self.analysis, dict[LoopName, Loop]()
        parts = [analysis.pending.get(v, Pending("insert", ())) for v in values]
        # The loops of the results' axes come first.
        axes = [
            self._axes(value, part.reductions, named)
            for value, part in zip(values, parts, strict=True)
        ]
        summed = {name for part in parts for name in part.reductions}
        reductions = [
            each
            for node in reversed(self.backwards)
            for each in analysis.reductions.get(node, ())
            if each.loop in summed
        ]
        for each in reductions:
            loop = named.setdefault(each.loop, Loop(each.contraction.size))
            loop.cuts.append(each.contraction.cut)
        cut = [name for name, loop in named.items() if len(loop.pieces) > 1]
        self.loops = [named[name] for name in cut]
        place = {name: number for number, name in enumerate(cut)}
        self._contracted = [
            (each.node, each.contraction.factor, place[each.loop])
            for each in reductions
            if each.loop in place
        ]
        return [
            Result(
                value,
                tuple(place.get(name) if name else None for name in row),
                tuple(place[name] for name in part.reductions if name in place),
                part.combiner,
            )
            for value, row, part in zip(values, axes, parts, strict=True)
        ]

    def _axes(
        self,
        value: Value,
        reductions: Collection[LoopName],
        named: dict[LoopName, Loop],
    ) -> list[LoopName | None]:
        """The loop of each axis of a value that is a partial result of others."""
        analysis, taken = self.analysis, {*reductions}
        names: list[LoopName | None] = []
        whole: set[int] = set()
        if value in analysis.kept and (node := value.producer) is not None:
            whole = analysis.rules[node].whole_axes(node.outs.index(value))
        for axis, cut in enumerate(analysis.cuts[value]):
            if axis in whole:
                names.append(None)
                continue
            name = free_loop(analysis.classes.find((value.number, axis)), taken)
            named.setdefault(name, Loop(value.shape[axis])).cuts.append(cut)
            taken.add(name)
            names.append(name)
        return names

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

    def shard(self, number: int) -> tuple[dict[int, Interval], tuple[bool, ...]]:
        """The piece of each loop of a shard, and whether it writes each result."""
        for family in self.families:
            if number < family.size:
                break
            number -= family.size
        pieces: dict[int, Interval] = {}
        later = set()
        for k in reversed(family.loops):
            number, piece = divmod(number, len(self.loops[k].pieces))
            pieces[k] = self.loops[k].pieces[piece]
            if piece:
                later.add(k)
        # A result that a loop does not cut is written by the first shard along it.
        written = tuple(
            k in family.results and later <= {*result.axes, *result.partial}
            for k, result in enumerate(self.results)
        )
        return dict(reversed(pieces.items())), written

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
        return self.patterns.recipe(*self._key(number))

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
                rows = [begin[at] for begin, at in zip(begins, index, strict=False)]
                starts = np.array(rows, np.int64).reshape(-1, len(numbers)).T
                numbers += first
                key, _ = self._key(int(numbers[0]))
                yield from self.patterns.members(key, numbers, starts)
            first += family.size

    def _key(self, number: int) -> tuple[ShardKey, list[int]]:
        """What tells a shard from others, and where its pieces start."""
        pieces, written = self.shard(number)
        lengths = tuple((k, stop - start) for k, (start, stop) in pieces.items())
        return (lengths, written), [start for start, _ in pieces.values()]

    def _walk(
        self, key: ShardKey, starts: Sequence[int]
    ) -> tuple[list[Box | None], Recipe]:
        """The boxes and the recipe of the shard with this key and these starts."""
        lengths, written = key
        pieces: dict[int, Interval] = {
            k: (start, start + length)
            for (k, length), start in zip(lengths, starts, strict=True)
        }
        contracted: dict[Node, dict[Factor, Interval]] = {}
        for node, factor, loop in self._contracted:
            if loop in pieces:
                contracted.setdefault(node, {})[factor] = pieces[loop]
        boxes = self.boxes(pieces, written)
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
