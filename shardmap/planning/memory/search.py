"""Finds along which axes, and into how many pieces, a function fits into memory.

The function as it is comes first. Then axes are cut: an axis of an image, say, is one
class in all layers, see `joined_classes`, and the classes that the most bytes carry
come first. An estimate of real shards gives the number of pieces, and XLA, which
compiles the largest shard, is the judge. If no class fits, the one that leaves the
least is cut along a further class. Arrays that lie in chunks are cut along their chunks
as long as any such cut fits.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.loop_classes import AxisKey, joined_classes
from shardmap.planning.engine.nodes import Graph, Node, Value
from shardmap.planning.engine.rules import Rule
from shardmap.planning.in_slices import Asked, cut_points
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.memory.compiled import Estimate, estimated
from shardmap.planning.run.cut_program import IN_MEMORY, CutProgram
from shardmap.units import AUTO, Auto, size

CLASSES = 3
"""The classes that are tried, and the most that are cut together. The first one was
right in 15 of 17 programs, the second one in the others."""

TRIES = 4
"""The most numbers of pieces of a cut, as each is analysed."""

VERDICTS = 3
"""The most verdicts of XLA against cuts: each takes longer than an analysis."""

NEAR = 1.5
"""An estimate may be so far from what XLA takes. It is asked up to there."""

FINER = 8
"""So many times the pieces are tried once if XLA contradicts an estimate."""

ROOMY = 0.6
"""Shards that take less than this part of the memory are made larger, once."""

USELESS = 0.95
"""A cut that leaves more than this part of the bytes does not help."""

READ_OFTEN = 3
"""Cuts of which a stage moves more than so many times the bytes of the function whole
are compared with others."""

AGAIN = 1.5
"""Other cuts are looked for if all read chunks more often than this."""

ALMOST = 9 / 8
"""Where nothing fits, pieces take about so many times what is not cut."""

SMALL = 129 / 128
"""For a refusal, pieces take so many times what is not cut."""

MOST_FUNCTIONS = 64
"""Cuts whose shards compute more different things, which compile long, are not made."""

QUICK = 256
"""A function of at most so many equations is compiled whole to see if it fits."""

MOST_PIECES = 2**16
"""The most pieces of an axis, which are listed."""

MOST_SHARDS = 2**20
"""The most shards, which may be more: those of ``x @ x.T`` are pairs of pieces."""

Axes = frozenset[tuple[int, int]]
"""Axes that are cut, as (number of the value in `Problem.values`, axis)."""


@dataclass(frozen=True)
class Problem:
    """A function that is to fit into memory.

    Attributes:
      make: cuts the function. Takes points, whether axes that are summed over are cut,
        and whether values may be kept for later stages.
      graph: the function before it is cut.
      rules: the rules of its nodes.
      values: the values at which cuts can begin: its arguments, then values inside.
      asked: the cuts of its arguments; `AUTO` for those whose number is sought.
      finds: whether the axes are sought too.
      partial: whether axes that are summed over may be cut.
      memory: the bytes that shards may take.
      in_loops: whether shards are bodies of loops, whose arguments and results exist.
      took: compiles shards, and returns the bytes that they take. It need not go on
        when these are more than a limit.
      chunks: (argument, axis) -> where its chunks begin; None: it has none.
      times_read: returns how often pieces read each chunk, on average.
      best: (argument, axis) -> those of ``chunks`` that are taken if they are enough.
      whole_chunks: whether chunks are not cut, however little fits.
    """

    make: Callable[[Asked, bool, bool], CutProgram]
    graph: Graph
    rules: Mapping[Node, Rule]
    values: Sequence[Value]
    asked: Asked
    finds: bool
    partial: bool
    memory: int
    in_loops: bool
    took: Callable[[CutProgram, float], int]
    chunks: Callable[[int, int], tuple[int, ...] | None] = lambda k, axis: None
    times_read: Callable[[Asked], float] = lambda asked: 1.0
    best: Callable[[int, int], tuple[int, ...]] = lambda k, axis: ()
    whole_chunks: bool = False

    def classes(self) -> list[Axes]:
        """The axes of each class that can be cut, the most bytes first."""
        find = joined_classes(self.graph, self.rules).find
        used = {x for node in self.graph.nodes for x in node.ins}
        axes: dict[AxisKey, set[tuple[int, int]]] = {}
        for k, value in enumerate(self.values):
            is_sought = self.finds or k >= len(self.asked)
            for axis, length in enumerate(value.shape):
                if length > 1 and is_sought and value in used:
                    axes.setdefault(find((value.number, axis)), set()).add((k, axis))
        carried = dict.fromkeys(axes, 0)
        results = (v for node in self.graph.nodes for v in node.outs)
        for value in [*(v for v in self.graph.inputs if v in used), *results]:
            for root in {find((value.number, axis)) for axis in range(value.aval.ndim)}:
                if root in carried:
                    carried[root] += nbytes(value)
        ranked = sorted(carried, key=lambda root: -carried[root])
        return [frozenset(axes[root]) for root in ranked]

    def borders(self, k: int, axis: int) -> tuple[int, ...] | None:
        """Where the chunks of a value begin along an axis; None: it has none."""
        return self.chunks(k, axis) if k < len(self.asked) else None

    def most(self, axes: Axes, along_chunks: bool) -> int:
        """The most pieces of some axes."""
        borders = [self.borders(k, axis) for k, axis in axes]
        chunks = [len(each) + 1 for each in borders if each is not None]
        lengths = [self.values[k].shape[axis] for k, axis in axes]
        return max((along_chunks and chunks) or lengths, default=1)

    def points(self, way: "Way") -> Asked:
        """The cuts that were asked for, and those of a way."""
        rows = [list(row) for row in self.asked]
        if any(k >= len(rows) for axes, _ in way.cuts for k, _ in axes):
            rows += [[()] * len(value.shape) for value in self.values[len(rows) :]]
        for axes, pieces in way.cuts:
            for k, axis in axes:
                length, borders = self.values[k].shape[axis], self.borders(k, axis)
                most = max(length, 1) if borders is None else len(borders) + 1
                if borders and pieces <= len(best := self.best(k, axis)) + 1:
                    borders = best
                if pieces > most and borders and not way.along_chunks:
                    rows[k][axis] = _within(borders, length, pieces)
                else:
                    rows[k][axis] = cut_points(min(pieces, most), length, borders)
        return tuple(map(tuple, rows))


def _within(borders: tuple[int, ...], length: int, count: int) -> tuple[int, ...]:
    """About ``count`` pieces of an axis, as many in each of its chunks.

    >>> _within((4,), 8, 3)
    (2, 4, 6)
    """
    edges = [0, *borders, length]
    each = math.ceil(count / (len(borders) + 1))
    points = {
        start + k * (stop - start) // each
        for start, stop in itertools.pairwise(edges)
        for k in range(each)
    }
    return tuple(sorted(points - {0}))


class Way(NamedTuple):
    """A way to cut a function.

    Attributes:
      cuts: axes, and the number of their pieces. That of the last ones is sought.
      along_chunks: whether arrays that lie in chunks are cut between chunks only.
      partial: whether axes that are summed over are cut.
      keeps: whether what costs time is kept for later stages.
    """

    cuts: tuple[tuple[Axes, int], ...]
    along_chunks: bool
    partial: bool
    keeps: bool = True

    @property
    def pieces(self) -> int:
        return self.cuts[-1][1] if self.cuts else 1

    def in_pieces(self, count: int) -> "Way":
        *others, (axes, _) = self.cuts
        return self._replace(cuts=(*others, (axes, count)))


class Attempt(NamedTuple):
    """A cut function, and what it takes.

    Attributes:
      way: how it is cut.
      program: the cut function.
      estimate: about what it takes.
      took: the most that a shard holds, as XLA says; None: it was not compiled.
    """

    way: Way
    program: CutProgram
    estimate: Estimate
    took: int | None = None

    @property
    def bytes(self) -> int:
        return self.estimate.held.bytes if self.took is None else self.took

    @property
    def uncut(self) -> float:
        """About what it would take in any number of pieces."""
        held = self.estimate.held
        return held.whole * self.bytes / max(held.bytes, 1)


class _Spent(Exception):
    """XLA may not be asked any more."""


def program_within(problem: Problem) -> CutProgram:
    """The function, cut so that its shards fit; a ValueError says what would do."""
    search = _Search(problem)
    try:
        fits = search.run()
    except _Spent:
        fits = None
    fits = fits or search.least()
    if fits.bytes > problem.memory:
        raise ValueError(_refusal(problem, fits))
    return fits.program


class _Search:
    """The attempts to cut a function so that it fits."""

    def __init__(self, problem: Problem) -> None:
        self._attempts: dict[tuple[Asked, bool, bool], Attempt] = {}
        self._problem, self._memory = problem, problem.memory
        self._refused = 0

    def run(self) -> Attempt | None:
        """The first attempt that fits."""
        problem = self._problem
        given = frozenset(
            (k, axis)
            for k, row in enumerate(problem.asked)
            for axis, points in enumerate(row)
            if isinstance(points, Auto)
        )
        cuts: tuple[tuple[Axes, int], ...] = ((given, 1),) if given else ()
        whole = self._attempt(Way(cuts, False, problem.partial))
        if self._may_fit(whole) and self._fits(whole := self._judge(whole)):
            return whole
        if whole.estimate.shards > 1 and whole.program.analysis.costly:
            less = self._judge(self._attempt(whole.way._replace(keeps=False)))
            if self._fits(less):
                return less
        self._once = whole.estimate.moved
        classes = [given] if given else problem.classes()
        is_chunked = any(
            problem.borders(*each) is not None for axes in classes for each in axes
        )
        along = (True,) if problem.whole_chunks else (True, False)
        for along_chunks in along if is_chunked else (False,):
            least, cuts = whole, ()
            for _ in range(CLASSES):
                way = whole.way._replace(cuts=cuts, along_chunks=along_chunks)
                tried = list(self._sized_ways(way, classes, least))
                ways = [*tried]
                if not cuts and self._reads_again(tried):
                    ways += self._along_both(way, classes)
                # Those that seem to fit come first.
                for attempt in sorted(
                    ways, key=lambda x: (x.bytes > self._memory, self._moved(x))
                ):
                    if attempt.bytes <= NEAR * self._memory:
                        if fits := self._judged(attempt):
                            return fits
                if not tried:
                    break
                least = min(tried, key=self._promise)
                cuts, classes = least.way.cuts, problem.classes()
        return None

    def _may_fit(self, whole: Attempt) -> bool:
        """Whether a function with the cuts that are given is compiled to see."""
        if whole.bytes <= self._memory or whole.estimate.shards > 1:
            return True
        graph, rules = whole.program.graph, whole.program.analysis.rules
        room = self._memory
        if self._problem.in_loops:
            # A large result is made in the memory of the function's results.
            room += sum(nbytes(v) for v in graph.outputs if isinstance(v, Value))
        elif whole.estimate.moved > room:
            return False
        # XLA does not tell what some kernels of CPU hold, such as those of attention.
        stored = (
            nbytes(value)
            for node in graph.nodes
            if not (rules[node].cheap or node.primitive in COMBINERS)
            for value in node.outs
            if value not in graph.outputs
        )
        return len(graph.nodes) <= QUICK and max(stored, default=0) <= room

    def _sized_ways(
        self, way: Way, classes: Sequence[Axes], before: Attempt
    ) -> Iterator[Attempt]:
        """The cuts of one class more that help; one that moves little ends it."""
        cut = frozenset().union(*(axes for axes, _ in way.cuts))
        others = (axes - cut for axes in classes)
        others = (x for x in others if self._problem.most(x, way.along_chunks) > 1)
        for axes in itertools.islice(others, CLASSES):
            further = way._replace(cuts=(*way.cuts, (axes, 1)))
            attempt = self._sized(further, before)
            is_cut = attempt.estimate.shards > before.estimate.shards
            most = max(before.bytes, before.estimate.held.bytes)
            if is_cut and attempt.bytes <= USELESS * most:
                yield attempt
                often = READ_OFTEN * len(attempt.program.stages)
                is_near = attempt.bytes <= NEAR * self._memory
                if is_near and self._moved(attempt) <= often * self._once:
                    break

    def _reads_again(self, tried: Sequence[Attempt]) -> bool:
        """Whether each of some cuts reads chunks again."""
        return min(map(self._moved, tried), default=0) > AGAIN * self._once

    def _along_both(self, way: Way, classes: Sequence[Axes]) -> Iterator[Attempt]:
        """The cuts of one class, after those for which no chunk is read again."""
        count, best = len(self._problem.asked), self._problem.best
        pieces = (
            max(len(best(*x)) + 1 if x[0] < count else 1 for x in c) for c in classes
        )
        cuts = tuple(x for x in zip(classes, pieces, strict=True) if x[1] > 1)
        if cuts:
            way = way._replace(cuts=cuts)
            yield from self._sized_ways(way, classes, self._attempt(way))

    def _moved(self, attempt: Attempt) -> float:
        """About the bytes that all shards read, with the rest of chunks, and return."""
        points = self._problem.points(attempt.way)
        return attempt.estimate.moved * self._problem.times_read(points)

    def _most(self, way: Way) -> int:
        """The most pieces of the axes of a way whose number is sought."""
        axes, _ = way.cuts[-1]
        return min(self._problem.most(axes, way.along_chunks), MOST_PIECES)

    def _promise(self, attempt: Attempt) -> tuple[bool, float]:
        """By what cuts are sorted that are cut along a further class, too.

        Those come first that leave, and move, little. If half of it does not fit, only
        what is left counts.
        """
        floor = self._floor(attempt)
        is_far = floor > 2 * self._memory
        return is_far, floor if is_far else floor * self._moved(attempt)

    def _floor(self, attempt: Attempt) -> float:
        """About what pieces of one element would take."""
        if not attempt.way.cuts:
            return attempt.bytes
        length = self._most(attempt.way) / attempt.way.pieces
        return attempt.uncut + (attempt.bytes - attempt.uncut) / max(length, 1)

    def _pieces(self, attempt: Attempt, room: float) -> int:
        """The fewest pieces that take at most ``room``, if what is cut shrinks."""
        uncut = attempt.uncut if attempt.way.pieces > 1 else 0
        room = max(room - uncut, 1)
        most = self._most(attempt.way)
        length = math.ceil(most / attempt.way.pieces)
        length = math.floor(length * room / max(attempt.bytes - uncut, 1))
        return math.ceil(most / min(max(length, 1), math.ceil(most / 2)))

    def _sized(self, way: Way, before: Attempt) -> Attempt:
        """A way in about the fewest pieces that fit, as estimated."""
        tried = self._in_pieces(way, before)
        attempt = self._fewest(tried)
        if attempt.bytes > self._memory or 2 * attempt.estimate.kept > self._memory:
            for less in self._keeping_less(attempt):
                for other in self._in_pieces(less, before):
                    if other.estimate.shards > before.estimate.shards:
                        tried.append(other)
        return self._fewest(tried)

    def _fewest(self, tried: Sequence[Attempt]) -> Attempt:
        """The fewest pieces that fit, else what holds the least."""
        if fits := [each for each in tried if each.bytes <= self._memory]:
            return min(fits, key=lambda each: each.way.pieces)
        return min(tried, key=lambda each: each.bytes)

    def _in_pieces(self, way: Way, before: Attempt) -> list[Attempt]:
        """A way in some numbers of pieces, of which one fits, if the estimate is so."""
        attempt = before._replace(way=way)
        tried: dict[Way, Attempt] = {}
        for _ in range(TRIES):
            room = max(self._memory, ALMOST * attempt.uncut if tried else 0)
            attempt = self._attempt(way.in_pieces(self._pieces(attempt, room)))
            is_cut = attempt.estimate.shards > before.estimate.shards
            if attempt.way in tried or not is_cut:
                break
            tried[attempt.way] = attempt
            if attempt.bytes <= self._memory:
                break
        return list(tried.values()) or [attempt]

    def _keeping_less(self, attempt: Attempt) -> Iterator[Way]:
        """Other ways to cut these axes, which keep less for later stages."""
        way = attempt.way
        if way.keeps and attempt.program.analysis.costly:
            yield way._replace(keeps=False)
        # In self-attention, say, sums over the keys keep the product for a later stage.
        if way.partial:
            yield way._replace(partial=False, keeps=False)

    def _judged(self, attempt: Attempt) -> Attempt | None:
        """A cut that fits, as XLA says, in about the fewest pieces."""
        fits: Attempt | None = None
        for first in (True, *[False] * (TRIES - 1)):
            if self._compiles_long(attempt):
                break
            attempt = self._judge(attempt)
            before, pieces = attempt.way.pieces, self._pieces(attempt, self._memory)
            if self._fits(attempt):
                if fits or attempt.bytes >= ROOMY * self._memory or 2 * pieces > before:
                    return attempt
                fits = attempt
            elif fits:
                break
            elif ALMOST * attempt.uncut > self._memory:
                if not first or attempt.bytes > NEAR * self._memory:
                    break
                pieces = FINER * before  # What is cut may be of another stage.
            else:
                pieces = max(pieces, math.ceil(before * (9 / 8 if first else 3 / 2)))
            way = attempt.way.in_pieces(min(pieces, self._most(attempt.way)))
            if way == attempt.way:
                break
            attempt = self._attempt(way)
        return fits

    def _fits(self, attempt: Attempt) -> bool:
        """Whether XLA says that it fits."""
        return attempt.took is not None and attempt.took <= self._memory

    def _attempt(self, way: Way) -> Attempt:
        """The function, cut in a way."""
        if (key := self._key(way)) not in self._attempts:
            program = self._problem.make(*key)
            estimate = estimated(program, self._problem.in_loops)
            self._attempts[key] = Attempt(way, program, estimate)
        return self._attempts[key]._replace(way=way)

    def _judge(self, attempt: Attempt) -> Attempt:
        """The attempt with what XLA says that it takes."""
        if self._refused == VERDICTS:
            raise _Spent
        if attempt.took is None:
            took = self._problem.took(attempt.program, self._memory)
            self._refused += took > self._memory
            attempt = self._attempts[self._key(attempt.way)] = attempt._replace(
                took=took
            )
        return attempt

    def _key(self, way: Way) -> tuple[Asked, bool, bool]:
        return self._problem.points(way), way.partial, way.keeps

    def _compiles_long(self, attempt: Attempt) -> bool:
        """Whether there are very many shards, or they compute many different things.

        In loops, each group of shards is compiled.
        """
        if attempt.estimate.shards > MOST_SHARDS:
            return True
        for stage in attempt.program.stages:
            # To find a group takes long, too: no more are looked at than tell.
            groups = itertools.islice(stage.members(), 2 * MOST_FUNCTIONS)
            if self._problem.in_loops:
                count = len(list(groups))
            else:
                count = len({each.pattern.recipe.static for each in groups})
            if count > MOST_FUNCTIONS:
                return True
        return False

    def least(self) -> Attempt:
        """What takes the least, compiled: what is told is enough, not an estimate."""
        whole, *cut = self._attempts.values()
        for attempt in sorted(cut, key=self._floor)[:2]:
            for _ in attempt.way.cuts:  # Each of them becomes the last one.
                first, *others = attempt.way.cuts
                way = attempt.way._replace(cuts=(*others, first))
                attempt = attempt._replace(way=way)
                pieces = self._pieces(attempt, SMALL * attempt.uncut)
                if pieces > way.pieces:
                    attempt = self._attempt(way.in_pieces(pieces))
                    cut.append(attempt)
        every = [x for x in cut if not self._compiles_long(x)]
        every = sorted([whole, *every], key=lambda each: each.bytes)
        judged: list[Attempt] = []
        for attempt in every[: min(VERDICTS + 1 - self._refused, 2)]:
            took = self._problem.took(attempt.program, math.inf)
            judged.append(attempt._replace(took=took))
            if took <= NEAR * attempt.bytes:
                break
        return min(judged, key=lambda each: each.bytes)


def _refusal(problem: Problem, refused: Attempt) -> str:
    """Names the least that any way takes, and what would help."""
    held = refused.estimate.held
    count = math.prod(pieces for _, pieces in refused.way.cuts)
    pieces, remedy = "as a whole", "" if problem.finds else ", or cut other axes"
    if count > 1:
        pieces = f"in {count:,} pieces"
    elif any(each and each != AUTO for row in problem.asked for each in row):
        pieces = "in the pieces that in_slices gives"
        remedy = ", or cut into more pieces, or use AUTO"
    value = ""
    if refused.bytes > 2 * held.bytes:
        scratch = size(refused.bytes - held.bytes)
        value = f", of it {scratch} in scratch memory of XLA's kernels"
    elif (part := held.largest) is not None:
        value = f", of it {size(part.bytes)} in "
        value += part.value.aval.update(shape=part.shape).str_short()
        if part.value.producer and part.value.producer.source:
            value += f" made at {part.value.producer.source}"
        if any(part.value in kept for kept in refused.program.kept):
            value += ", kept for later stages"
            if part.bytes > IN_MEMORY and not problem.in_loops:
                remedy += ", or a folder as scratch"
    exact = f" ({refused.bytes:,} bytes)" if refused.bytes >= 1024 else ""
    enough = math.ceil(1.02 * refused.bytes)  # Other pieces may take a little more.
    return (
        f"memory={size(problem.memory)} is too little: {pieces} the function still "
        f"holds {size(refused.bytes)}{exact} at once{value}. "
        f"Pass memory={enough} or more{remedy}."
    )
