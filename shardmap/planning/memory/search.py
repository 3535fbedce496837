"""Finds along which axes, and into how many pieces, a function fits into memory.

The function as it is comes first. Then axes are cut: an axis of an image, say, is one
class in all layers, see `joined_classes`, and the classes that the most bytes carry
come first. The engine analyses each cut. An estimate of one of its shards gives the
number of pieces, and XLA, which compiles the largest shard, is the judge. If no class
fits, the one that leaves the least is cut along a further class. Arrays that lie in
chunks are cut along their chunks as long as any such cut fits.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.loop_classes import AxisKey, joined_classes
from shardmap.planning.engine.nodes import Graph, Value
from shardmap.planning.engine.rules import Rule
from shardmap.planning.in_slices import Asked, cut_points
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.memory.compiled import Estimate, estimated
from shardmap.planning.run.cut_program import IN_MEMORY, CutProgram
from shardmap.units import AUTO, Auto, size

ANALYSES = 40
"""The most cut functions that are analysed: each takes about as long as `plan`."""

REFUSED = 4
"""So many verdicts of XLA against cuts end a search: each takes longer still."""

REFUSALS = 2
"""How many cuts are compiled to tell what is enough."""

CLASSES = 3
"""The classes that are cut: those that the most bytes carry."""

FURTHER = 2
"""Those of them that are cut in addition to others."""

MOST_AXES = 3
"""The most classes that are cut together, as the pieces of all of them multiply."""

TRIES = 4
"""The most numbers of pieces of a cut."""

USELESS = 0.95
"""A further class that leaves more than this part of the bytes is not cut."""

READ_ONCE = 3
"""Cuts of which a stage moves at most so many times the bytes of the function whole are
judged without a look at others."""

MOST_FUNCTIONS = 64
"""Cuts whose shards compute more different things, which compile long, are not made."""

READ_OFTEN = 8
"""Cuts of which a stage moves more than so many times these bytes are judged last."""

SHARD_BYTES = 2**14
"""Each further shard takes about as long as moving so many bytes."""

DOUBTFUL = 1.5
"""So far an estimate may be from what XLA takes: it is asked up to there."""

ALMOST = 9 / 8
"""Then, pieces are so small that all take about so many times what is not cut."""

ABOVE = 1.02
"""Other pieces may take so many times what an exact number of pieces would."""

MOST_TIMES = 4
"""So many times an estimate XLA may take of other cuts, if it did of one."""

ROOMY = 0.6
"""Shards that take less than this part of the memory are made larger, once."""

FEWER = 8
"""Where each piece keeps a part, so many times fewer pieces are tried."""

SURE = 1.25
"""If XLA takes more than so many times an estimate, a second cut is compiled."""

FINER = 8
"""For a refusal, pieces are made at least so many times smaller."""

SMALL = 128
"""Of a refusal, what is cut takes about so many times less than what is not."""

QUICK = 256
"""A function of at most so many equations is compiled whole to see if it fits."""

MOST_PIECES = 2**16
"""The most pieces of an axis, which are listed."""

SECOND = 1.0
"""The seconds between two lines that tell what is planned."""

Axes = frozenset[tuple[int, int]]
"""Axes that are cut, as (number of the value in `Problem.values`, axis)."""


@dataclass(frozen=True)
class Problem:
    """A function that is to fit into memory.

    Attributes:
      make: cuts the function. Takes points, whether axes that are summed over are cut,
        and whether values may be kept for later stages.
      graph: the function before it is cut.
      rules: the rules of its nodes, by number.
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
    rules: Mapping[int, Rule]
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
    _told: list[float] = field(default_factory=lambda: [time.monotonic()])

    def tell(self, doing: str) -> None:
        """Says on stderr what is done, at most once a second."""
        if (now := time.monotonic()) - self._told[-1] > SECOND:
            seconds = now - self._told[0]
            self._told[1:] = [now]
            text = f"planning within {size(self.memory)}: {doing}, {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)

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
        made = (v for node in self.graph.nodes for v in node.outs)
        for value in [*(v for v in self.graph.inputs if v in used), *made]:
            for root in {find((value.number, axis)) for axis in range(value.aval.ndim)}:
                if root in carried:
                    carried[root] += nbytes(value)
        ranked = sorted(carried, key=lambda root: -carried[root])
        return [frozenset(axes[root]) for root in ranked]

    def chunked(self, axes: Axes) -> list[int]:
        """The numbers of chunks along those of these axes that lie in chunks."""
        borders = [self.chunks(k, n) for k, n in axes if k < len(self.asked)]
        return [len(each) + 1 for each in borders if each is not None]

    def points(self, way: "Way", count: int) -> Asked:
        """The cuts that were asked for, and the axes of a way in ``count`` pieces."""
        values, chunks = self.values, self.chunks
        rows = [list(row) for row in self.asked]
        every = [*way.beside, (way.axes, count)]
        if any(k >= len(rows) for axes, _ in every for k, _ in axes):
            rows += [[()] * len(value.shape) for value in values[len(rows) :]]
        for axes, pieces in every:
            for k, axis in axes:
                length = values[k].shape[axis]
                borders = chunks(k, axis) if k < len(self.asked) else None
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
      axes: the axes that are cut, into a number of pieces that is sought.
      along_chunks: whether arrays that lie in chunks are cut between chunks only.
      partial: whether axes that are summed over are cut.
      keeps: whether what costs time is kept for later stages.
      beside: other axes, and the number of their pieces.
    """

    axes: Axes
    along_chunks: bool
    partial: bool
    keeps: bool = True
    beside: tuple[tuple[Axes, int], ...] = ()


class Attempt(NamedTuple):
    """A cut function, and what it takes.

    Attributes:
      way: how it is cut.
      pieces: the number of pieces of the axes of the way; 0 if that is given.
      program: the cut function.
      estimate: about what it takes.
      took: the most that a shard holds, as XLA says; None: it was not compiled.
    """

    way: Way
    pieces: int
    program: CutProgram
    estimate: Estimate
    took: int | None = None

    @property
    def bytes(self) -> int:
        return self.estimate.held.bytes if self.took is None else self.took

    def fits(self, memory: int) -> bool:
        """Whether XLA says that it fits."""
        return self.took is not None and self.took <= memory

    @property
    def whole(self) -> int:
        """About what it would take in any number of pieces."""
        return min(self.estimate.held.whole, self.bytes)


class _Spent(Exception):
    """No further cut function may be analysed or compiled."""


def program_within(problem: Problem) -> CutProgram:
    """The function, cut so that its shards take at most ``problem.memory``.

    Raises:
      ValueError: it does not fit, whatever is cut.
    """
    search = _Search(problem)
    try:
        fits = search.run()
    except _Spent:
        fits = None
    if fits is None:
        fits = search.least()
        if fits.bytes > problem.memory:
            raise ValueError(_refusal(problem, fits))
    return fits.program


class _Search:
    """The attempts to cut a function so that it fits.

    Attributes:
      attempts: what was cut so far. The first one is the function as it is.
    """

    def __init__(self, problem: Problem) -> None:
        self.attempts: list[Attempt] = []
        self._analysed: dict[tuple[Asked, bool, bool], tuple[CutProgram, Estimate]]
        self._analysed = {}
        self._problem, self._memory = problem, problem.memory
        self._analyses = self._refused = 0
        # The most that XLA took of an estimate, and the bytes that all need once.
        self._scale, self._once = 1.0, 0

    def run(self) -> Attempt | None:
        """The first attempt that fits."""
        problem = self._problem
        given = frozenset(
            (k, axis)
            for k, row in enumerate(problem.asked)
            for axis, points in enumerate(row)
            if isinstance(points, Auto)
        )
        if fits := self._as_it_is(given):
            return fits
        classes = problem.classes()
        is_chunked = any(map(problem.chunked, [given, *classes]))
        along = (True,) if problem.whole_chunks else (True, False)
        for along_chunks in along if is_chunked else (False,):
            way = Way(given, along_chunks, problem.partial)
            ways = [way] if given else self._further(way, classes)
            least, waiting = self.attempts[0], list[Attempt]()
            for _ in range(MOST_AXES):
                before = len(self.attempts)
                waiting = sorted(
                    waiting + self._candidates(ways, least), key=self._cost
                )
                while waiting and self._moves(waiting[0], READ_OFTEN):
                    if fits := self._judged(waiting.pop(0)):
                        return fits
                tried = self.attempts[before:]
                held = min(map(self._floor, tried), default=math.inf)
                if held > USELESS * least.bytes:
                    break
                # What would leave the least is cut along a further class.
                least = min(tried, key=self._floor)
                beside = *least.way.beside, (least.way.axes, least.pieces)
                way = least.way._replace(axes=frozenset(), beside=beside)
                ways = self._further(way, classes)
            for attempt in waiting:
                if fits := self._judged(attempt):
                    return fits
        return None

    def _as_it_is(self, given: Axes) -> Attempt | None:
        """The function with the cuts that are given, and no others, if it fits."""
        asked = self._problem.asked
        is_cut = any(each and each != AUTO for row in asked for each in row)
        for keeps in (True, False) if is_cut else (True,):
            way = Way(given, False, self._problem.partial, keeps)
            attempt = self._attempt(way, int(bool(given) or not is_cut))
            self._once = attempt.estimate.moved
            if is_cut or self._may_fit(attempt):
                attempt = self._judge(attempt)
            else:
                self.attempts.append(attempt)
            if attempt.fits(self._memory):
                return attempt
        return None

    def _may_fit(self, whole: Attempt) -> bool:
        """Whether a function that is not cut may fit, and compiles in a short time."""
        graph, rules = whole.program.graph, whole.program.analysis.rules
        if whole.bytes <= self._memory:
            return True
        room = self._memory
        if self._problem.in_loops:
            # A large result is made in the memory of the function's results.
            room += sum(nbytes(v) for v in graph.outputs if isinstance(v, Value))
        elif whole.estimate.moved > room:
            return False
        stored = (
            nbytes(value)
            for node in graph.nodes
            if not (rules[node.number].cheap or node.primitive in COMBINERS)
            for value in node.outs
            if value not in graph.outputs
        )
        return len(graph.nodes) <= QUICK and max(stored, default=0) <= room

    def _further(self, way: Way, classes: Sequence[Axes]) -> list[Way]:
        """Cuts a way along one class more, of those that the most bytes carry."""
        cut = frozenset().union(*(axes for axes, _ in way.beside))
        more = [way._replace(axes=axes - cut) for axes in classes]
        more = [each for each in more if self._most(each) > 1]
        return more[: FURTHER if way.beside else CLASSES]

    def _candidates(self, ways: Sequence[Way], whole: Attempt) -> list[Attempt]:
        """The ways that may fit; the first one of which shards move little ends it.

        Args:
          ways: cuts of one class more.
          whole: the function without these.
        """
        candidates: list[Attempt] = []
        for way in ways:
            attempt = self._sized(way, whole, tries=2 if candidates else TRIES)
            if self._is_useless(attempt, whole):
                continue
            may_fit = attempt.bytes <= DOUBTFUL * self._memory
            if may_fit and not self._compiles_long(attempt):
                candidates.append(attempt)
                if self._moves(attempt, READ_ONCE):
                    break
        return candidates

    def _moved(self, attempt: Attempt) -> float:
        """About the bytes that all shards read, with the rest of chunks, and return."""
        points = self._problem.points(attempt.way, attempt.pieces)
        return attempt.estimate.moved * self._problem.times_read(points)

    def _moves(self, attempt: Attempt, times: float) -> bool:
        """Whether a stage moves at most so many times what the function does whole."""
        stages = max(len(attempt.program.stages), 1)
        return self._moved(attempt) <= times * stages * self._once

    def _cost(self, attempt: Attempt) -> tuple[bool, float]:
        """By what cuts that may fit are sorted: those that seem to fit come first."""
        is_doubtful = attempt.bytes * self._scale > self._memory
        shards = SHARD_BYTES * attempt.estimate.shards
        return is_doubtful, self._moved(attempt) + shards

    def _floor(self, attempt: Attempt) -> float:
        """About what pieces of one element would take."""
        length = self._most(attempt.way) / max(attempt.pieces, 1)
        return attempt.whole + (attempt.bytes - attempt.whole) / max(length, 1)

    def _most(self, way: Way) -> int:
        """The most pieces."""
        lengths = [self._problem.values[k].shape[axis] for k, axis in way.axes]
        if way.along_chunks:
            lengths = self._problem.chunked(way.axes) or lengths
        return min(max(lengths, default=1), MOST_PIECES)

    def _pieces(self, attempt: Attempt, held: float, room: float) -> int | None:
        """The fewest pieces that fit, if what is cut shrinks with them; None: none.

        Args:
          attempt: the function in other pieces.
          held: what these hold, of which ``attempt.whole`` stays.
          room: what pieces may hold.
        """
        whole = attempt.whole if attempt.pieces > 1 else 0
        if whole >= room:
            return None
        most = self._most(attempt.way)
        length = math.ceil(most / max(attempt.pieces, 1))
        length = math.floor(length * (room - whole) / max(held - whole, 1))
        return math.ceil(most / min(max(length, 1), math.ceil(most / 2)))

    def _sized(self, way: Way, whole: Attempt, tries: int) -> Attempt:
        """A way in about the fewest pieces of which one fits, by its estimate.

        Args:
          way: the way.
          whole: the function without this cut.
          tries: the most numbers of pieces.
        """
        room = self._memory / self._scale
        attempt = whole._replace(way=way, pieces=1)
        tried: dict[tuple[Way, int], Attempt] = {}
        while len(tried) < tries:
            most = room if attempt.took is None else self._memory
            pieces = self._pieces(attempt, attempt.bytes, most)
            if pieces is None and attempt.whole <= DOUBTFUL * room:
                pieces = self._pieces(attempt, attempt.bytes, ALMOST * attempt.whole)
            if pieces is None and self._keeps_most(attempt):
                pieces = _fewer(attempt.pieces, [n for _, n in tried])
            if pieces is None or (way, pieces) in tried:
                fits = attempt.bytes <= DOUBTFUL * room
                other = None if fits else self._keeping_less(attempt)
                if other is None:
                    break
                way, pieces = other, attempt.pieces
            attempt = tried[way, pieces] = self._attempt(way, pieces)
            if way.keeps and attempt.program.analysis.costly:
                if self._keeps_most(attempt):
                    less = way._replace(keeps=False)
                    tried[less, pieces] = self._attempt(less, pieces)
                    if tried[less, pieces].bytes < attempt.bytes:
                        way, attempt = less, tried[less, pieces]
            if ROOMY * room <= attempt.bytes <= room:
                break
            is_cut = attempt.estimate.shards > whole.estimate.shards
            if not is_cut or (
                attempt.whole >= room and self._is_useless(attempt, whole)
            ):
                break
        cut = [x for x in tried.values() if x.estimate.shards > whole.estimate.shards]
        self.attempts += cut
        fitting = [each for each in tried.values() if each.bytes <= room]
        if fitting:
            return min(fitting, key=lambda each: each.pieces)
        return min(tried.values(), key=lambda each: each.bytes)

    def _is_useless(self, attempt: Attempt, whole: Attempt) -> bool:
        """Whether a cut does not make shards smaller."""
        if attempt.estimate.shards <= whole.estimate.shards:
            return True
        before = max(whole.bytes, whole.estimate.held.bytes)
        return attempt.bytes > USELESS * before

    def _keeping_less(self, attempt: Attempt) -> Way | None:
        """Another way to cut these axes, which keeps less for later stages."""
        way, program = attempt.way, attempt.program
        if way.keeps and program.analysis.costly:
            return way._replace(keeps=False)
        # In self-attention, say, sums over the keys keep the product for a later stage.
        if way.partial and self._keeps_most(attempt):
            return way._replace(partial=False, keeps=False)
        return None

    def _keeps_most(self, attempt: Attempt) -> bool:
        """Whether what is kept for later stages leaves little room for shards."""
        return 2 * attempt.estimate.kept > self._memory

    def _judged(self, attempt: Attempt) -> Attempt | None:
        """A cut that fits, as XLA says; if it does not, one that keeps less."""
        fits = self._in_few_pieces(attempt)
        if fits is None and (way := self._keeping_less(attempt)):
            whole = self.attempts[0]
            attempt = self._sized(way, whole, TRIES)
            may_fit = attempt.bytes <= DOUBTFUL * self._memory
            if may_fit and not self._is_useless(attempt, whole):
                return self._judged(attempt)
        return fits

    def _in_few_pieces(self, attempt: Attempt) -> Attempt | None:
        """A cut that fits, as XLA says, in about the fewest pieces."""
        fits: Attempt | None = None
        judged: list[Attempt] = []
        while True:
            attempt = self._judge(attempt)
            judged.append(attempt)
            if attempt.fits(self._memory):
                if fits or attempt.bytes >= ROOMY * self._memory:
                    return attempt
                fits = attempt
            elif fits:
                return fits
            constant, times = _line(judged[-2:])
            room = (self._memory / ABOVE - constant) / times
            pieces = self._pieces(attempt, attempt.estimate.held.bytes, room)
            if len(judged) == 2 and _rises(*judged):
                pieces = 4 * attempt.pieces
            is_near = attempt.bytes <= DOUBTFUL * self._memory
            if pieces is None and len(judged) == 1 and is_near:
                # The estimate may be of another stage.
                pieces = FINER * attempt.pieces
            if pieces is None or (fits and pieces > 0.75 * fits.pieces):
                return fits
            way, more = attempt.way, attempt.bytes / self._memory
            if not fits:
                pieces = max(pieces, attempt.pieces + math.ceil(attempt.pieces / 8))
                pieces = min(pieces, self._most(way))
            if more > 2:  # Pieces of the last class alone may not be what takes it.
                beside = ((axes, math.ceil(more * n)) for axes, n in way.beside)
                way = way._replace(beside=tuple(beside))
            if any((way, pieces) == each[:2] for each in judged):
                return fits
            attempt = self._attempt(way, pieces)
            if fits and constant + times * attempt.bytes > self._memory:
                return fits
            if self._compiles_long(attempt):
                return fits

    def _attempt(self, way: Way, pieces: int) -> Attempt:
        """The function in so many pieces."""
        asked = self._problem.points(way, pieces)
        key = asked, way.partial, way.keeps
        if key not in self._analysed:
            if self._analyses == ANALYSES:
                raise _Spent
            self._analyses += 1
            self._problem.tell(f"in {pieces:,} pieces" if pieces > 1 else "as it is")
            program = self._problem.make(*key)
            self._analysed[key] = program, estimated(program, self._problem.in_loops)
        return Attempt(way, pieces, *self._analysed[key])

    def _judge(self, attempt: Attempt) -> Attempt:
        if self._refused == REFUSED:
            raise _Spent
        took = self._problem.took(attempt.program, self._memory)
        self._refused += took > self._memory
        scale = took / max(attempt.bytes, 1)
        self._scale = max(self._scale, min(scale, MOST_TIMES))
        # What it took is known now: the estimate does not compete with it.
        self.attempts = [x for x in self.attempts if x.program is not attempt.program]
        self.attempts.append(attempt._replace(took=took))
        return self.attempts[-1]

    def _compiles_long(self, attempt: Attempt) -> bool:
        """Whether the shards of a stage compute very many different things.

        In loops, each group of shards is compiled.
        """
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
        self._analyses, as_it_is = 0, self.attempts[0]
        for attempt in sorted(self.attempts, key=self._floor)[:REFUSALS]:
            room, most = attempt.whole * (1 + 1 / SMALL) + 1, self._most(attempt.way)
            pieces = self._pieces(attempt, attempt.bytes, room) or 1
            pieces = min(max(pieces, FINER * attempt.pieces), most)
            if pieces > attempt.pieces > 0 and most > 1:
                self.attempts.append(self._attempt(attempt.way, pieces))
        compiled: list[Attempt] = []
        # A verdict comes after the estimate of the same program.
        every = list({each.program: each for each in self.attempts}.values())
        every.sort(key=lambda each: (each.bytes, -each.estimate.shards))
        for attempt in every:
            if attempt is as_it_is or not self._compiles_long(attempt):
                took = self._problem.took(attempt.program, math.inf)
                compiled.append(attempt._replace(took=took))
                is_sure = took <= SURE * attempt.estimate.held.bytes
                if is_sure or len(compiled) == REFUSALS:
                    break
        return min(compiled, key=lambda attempt: attempt.bytes)


def _fewer(pieces: int, tried: Sequence[int]) -> int:
    """Fewer pieces, where each keeps a part, so that the fewest hold more, too."""
    least = min(tried, default=pieces)
    return max(math.isqrt(least * pieces) if least < pieces else pieces // FEWER, 2)


def _rises(first: Attempt, second: Attempt) -> bool:
    """Whether a few more pieces take more: they may need one more stage."""
    return first.bytes <= second.bytes and second.pieces < 2 * first.pieces


def _line(judged: Sequence[Attempt]) -> tuple[float, float]:
    """What XLA takes of estimates: a constant, and so many times the estimate."""
    *_, last = judged
    held = last.estimate.held.bytes
    for first in judged[:-1]:
        if (less := first.estimate.held.bytes - held) > 0:
            times = max((first.bytes - last.bytes) / less, 1e-3)
            return last.bytes - times * held, times
    return 0.0, max(last.bytes / max(held, 1), 1e-3)


def _refusal(problem: Problem, refused: Attempt) -> str:
    """Names the least that any way takes, and what would help."""
    held = refused.estimate.held
    count = math.prod(n for _, n in refused.way.beside) * refused.pieces
    largest, shape, source, is_kept = held[2:]
    if refused.bytes > 2 * held.bytes:
        largest = refused.bytes - held.bytes
        shape, source, is_kept = "scratch memory of XLA's kernels", "", False
    pieces, remedy = "as a whole", "" if problem.finds else ", or cut other axes"
    if count > 1:
        pieces = f"in {count:,} pieces"
    elif not count:
        pieces = "in the pieces that in_slices gives"
        remedy = ", or cut into more pieces, or use AUTO"
    place = f" made at {source}" if source else ""
    if is_kept:
        place += ", kept for later stages"
        if largest > IN_MEMORY and not problem.in_loops:
            remedy += ", or a folder as scratch"
    value = f", of it {size(largest)} in {shape}{place}" if largest else ""
    exact = f" ({refused.bytes:,} bytes)" if refused.bytes >= 1024 else ""
    enough = math.ceil(1.02 * refused.bytes)  # Other pieces may take a little more.
    return (
        f"memory={size(problem.memory)} is too little: {pieces} the function still "
        f"holds {size(refused.bytes)}{exact} at once{value}. "
        f"Pass memory={enough} or more{remedy}."
    )
