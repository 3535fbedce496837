"""A stage: the results it makes, the loops it runs over, and one shard of it.

Shards that are alike are traced once. Shards whose pieces have equal lengths differ in
where these start. One of them is walked from results back to inputs, with `Affine`
starts. Its recipe, with other numbers, is that of all shards that satisfy the guards of
the walk: mostly all shards except those at the edges. The next shard that does not
satisfy them is walked again.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmap.planning.engine.affine import AffineMap, Guards, concrete, variables
from shardmap.planning.engine.analysis import Analysis, LoopName, Pending, free_loop
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Node, Value
from shardmap.planning.engine.recipe import Recipe, needed, trace_back
from shardmap.planning.engine.rules import Cut, Factor, Origins, meet
from shardmap.planning.engine.slices import Box, Interval, pieces

SPREAD = 64
"""About how many shards of a stage are sampled to describe all of them."""

ALONE = 8
"""Affine walks stop when patterns outnumber the shards that they served by this."""


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

Boxes: TypeAlias = list[Box | None]
"""The box of each result that a shard writes; None for one that it does not write."""


class Pattern(NamedTuple):
    """Shards that are alike.

    Attributes:
      guards: the conditions that their starts satisfy.
      affine_map: gives the numbers of one shard: those of the boxes that it writes,
        those of the boxes that it reads, and the starts of its recipe.
      boxes: the boxes that they write; ``affine_map`` replaces the numbers.
      recipe: their recipe; ``affine_map`` replaces the numbers.
    """

    guards: Guards
    affine_map: AffineMap
    boxes: Boxes
    recipe: Recipe

    def at(self, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
        """The boxes that the shard with these starts writes, and its recipe."""
        numbers = self.affine_map.at(starts)
        boxes = [box and _filled(box, numbers) for box in self.boxes]
        reads = [(value, _filled(box, numbers)) for value, box in self.recipe.reads]
        return boxes, self.recipe._replace(reads=tuple(reads), starts=tuple(numbers))


class Members(NamedTuple):
    """Shards of one pattern: their numbers, ascending, and their starts, row by row."""

    pattern: Pattern
    numbers: np.ndarray
    starts: np.ndarray


def _filled(box: Box, numbers: Iterator[int]) -> Box:
    return tuple((next(numbers), next(numbers)) for _ in box)


class Patterns:
    """The patterns of a stage, found on demand.

    ``walk`` returns what a shard with a key and starts writes, and its recipe.
    """

    def __init__(
        self, walk: Callable[[ShardKey, Sequence[int]], tuple[Boxes, Recipe]]
    ) -> None:
        self._walk = walk
        self._known: defaultdict[ShardKey, list[Pattern]] = defaultdict(list)
        # By key, the number of shards that known patterns served.
        self._served: Counter[ShardKey] = Counter()

    def recipe(self, key: ShardKey, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
        """The boxes that one shard writes, and its recipe."""
        for pattern in self._known[key]:
            if pattern.guards.match(starts):
                self._served[key] += 1
                return pattern.at(starts)
        return self._pattern(key, starts).at(starts)

    def members(
        self, key: ShardKey, numbers: np.ndarray, starts: np.ndarray
    ) -> Iterator[Members]:
        """Groups shards that have one key by their patterns; ``starts`` has rows."""
        known, tried = self._known[key], 0
        while len(numbers):
            is_new = tried == len(known)
            if is_new:
                pattern = self._pattern(key, starts[0].tolist())
                if tried == len(known):  # It holds for this shard only.
                    yield Members(pattern, numbers[:1], starts[:1])
                    numbers, starts = numbers[1:], starts[1:]
                    continue
            pattern = known[tried]
            tried += 1
            fits = np.broadcast_to(pattern.guards.match(starts.T), len(starts))
            self._served[key] += int(fits.sum()) - is_new
            if fits.any():
                yield Members(pattern, numbers[fits], starts[fits])
                numbers, starts = numbers[~fits], starts[~fits]

    def _pattern(self, key: ShardKey, starts: Sequence[int]) -> Pattern:
        """Makes the pattern of a shard that matches no known pattern.

        If patterns do not help, it holds for this shard only, and is not known.
        """
        known, guards = self._known[key], Guards()
        places = variables(guards, starts)
        helps = len(known) < self._served[key] + ALONE
        # `int` of a variable adds the guard that it keeps its value.
        boxes, recipe = self._walk(key, places if helps else list(map(int, places)))
        every = [box for box in boxes if box is not None]
        every += [box for _, box in recipe.reads]
        numbers = [n for box in every for interval in box for n in interval]
        affine_map = AffineMap([*numbers, *recipe.starts], len(starts))
        if helps:
            recipe = recipe._replace(static=concrete(recipe.static))
        pattern = Pattern(guards, affine_map, boxes, recipe)
        if helps:
            known.append(pattern)
        return pattern


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

    def boxes(self, pieces: Mapping[int, Interval], written: Sequence[bool]) -> Boxes:
        """What a shard with these pieces writes."""
        return [
            tuple(
                (0, size) if k is None else pieces.get(k, (0, size))
                for k, size in zip(result.axes, result.value.shape, strict=True)
            )
            if is_written
            else None
            for result, is_written in zip(self.results, written, strict=True)
        ]

    def recipe(self, number: int) -> tuple[Boxes, Recipe]:
        """The boxes that a shard writes, and its recipe."""
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

    def _walk(self, key: ShardKey, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
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
    kinds: dict[tuple[int, bool], list[int]] = {}
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
