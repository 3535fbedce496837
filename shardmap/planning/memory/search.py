"""Finds along which axes, and into how many pieces, a function fits into memory.

The function as it is comes first. Then the loop classes are ranked, see `loops`, and
the best three are cut; if none fits, the one that holds the least is cut along a
further class. An estimate gives the number of pieces, and XLA, which compiles the
largest shards, is the judge. A search analyses at most `ANALYSES` cut functions and
compiles at most `COMPILES` of them. Then it refuses, and tells the least that it saw,
for which it compiles at most `REFUSALS` more.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.nodes import Value
from shardmap.planning.in_slices import Asked, cut_points
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.memory.compiled import estimated, most_kept
from shardmap.planning.memory.held import Peak
from shardmap.planning.memory.loops import Axes, Followed, Uncut, ranked
from shardmap.planning.run.cut_program import IN_MEMORY, CutProgram
from shardmap.units import Auto, size

ANALYSES = 40
"""The most cut functions that are analysed: each takes about as long as `plan`."""

COMPILES = 8
"""The most of them that are compiled, which takes longer still."""

WAYS = 3
"""The classes that are cut, of those that are ranked."""

FURTHER = 2
"""Those of them that are cut in addition to others, of which shards compile slowly."""

MOST_AXES = 3
"""The most classes that are cut together, as the pieces of all of them multiply."""

TRIES = 4
"""The most numbers of pieces: the first one, two corrections, and fewer if it fits."""

DOUBTFUL = 1.25
"""So far an estimate may be from what XLA takes: it is asked up to there."""

HOPELESS = 0.95
"""Twice as many pieces that take more than this part do not help."""

REFUSALS = 3
"""How many more are compiled to tell what is enough."""

ROOMY = 0.6
"""Shards that take less than this part of the memory are made larger, once or twice."""

SMALL = 256
"""Of a refusal, shards take about so many times less than what is kept for them."""

QUICK = 128
"""A function of at most so many equations is compiled whole to see if it fits."""

SECOND = 1.0
"""The seconds between two lines that tell what is planned."""


@dataclass(frozen=True)
class Problem:
    """A function that is to fit into memory.

    Attributes:
      make: cuts the function. Takes points, whether axes that are summed over are cut,
        and whether values may be kept for later stages.
      uncut: the function before it is cut.
      asked: the cuts of its arguments; `AUTO` for those whose number is sought.
      finds: whether the axes are sought too.
      partial: whether axes that are summed over may be cut.
      memory: the bytes that shards may take.
      took: compiles shards, and returns the bytes that they take. It need not go on
        when these are more than a limit.
      chunks: (argument, axis) -> where its chunks begin; None: it has none.
      times_read: returns how often pieces read each chunk, on average.
    """

    make: Callable[[Asked, bool, bool], CutProgram]
    uncut: Uncut
    asked: Asked
    finds: bool
    partial: bool
    memory: int
    took: Callable[[CutProgram, float], int]
    chunks: Callable[[int, int], tuple[int, ...] | None] = lambda k, axis: None
    times_read: Callable[[Asked], float] = lambda asked: 1.0
    _told: list[float] = field(default_factory=lambda: [time.monotonic()])

    def tell(self, doing: str) -> None:
        """Says on stderr what is done, at most once a second."""
        if (now := time.monotonic()) - self._told[-1] > SECOND:
            seconds = now - self._told[0]
            self._told[1:] = [now]
            text = f"planning within {size(self.memory)}: {doing}, {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)

    def points(self, axes: Axes, count: int) -> Asked:
        """The cuts that were asked for, and these axes in ``count`` pieces."""
        values = self.uncut.values
        rows = [list(row) for row in self.asked]
        if any(k >= len(rows) for k, _ in axes):
            rows += [[()] * len(value.shape) for value in values[len(rows) :]]
        for k, axis in axes:
            borders = self.chunks(k, axis) if k < len(self.asked) else None
            rows[k][axis] = cut_points(count, values[k].shape[axis], borders)
        return tuple(map(tuple, rows))

    def ways(self, begin: Axes) -> Sequence[Axes]:
        """The best ways to cut one class more."""
        classes = self.uncut.classes()
        if not self.finds:
            # What no argument has may be cut nevertheless.
            count = len(self.asked)
            classes = [axes for axes in classes if all(k >= count for k, _ in axes)]

        def times_read(axes: Axes, count: int) -> float:
            return self.times_read(self.points(axes, count))

        memory, partial = self.memory, self.partial
        return ranked(self.uncut, begin, classes, memory, partial, times_read)[:WAYS]


class Way(NamedTuple):
    """A way to cut a function.

    Attributes:
      axes: the axes that are cut.
      partial: whether axes that are summed over are cut.
      keeps: whether what costs time is kept for later stages.
    """

    axes: Axes
    partial: bool
    keeps: bool


class Attempt(NamedTuple):
    """A cut function, and what it holds at most.

    Attributes:
      way: how it is cut.
      pieces: the number of pieces of each axis; 0 if that is given.
      program: the cut function.
      held: about what it holds.
      took: what it takes, as XLA says; None: it was not compiled.
    """

    way: Way
    pieces: int
    program: CutProgram
    held: Peak
    took: int | None = None

    @property
    def bytes(self) -> int:
        return self.held.bytes if self.took is None else self.took


class _Spent(Exception):
    """No further cut function may be analysed or compiled."""


def program_within(problem: Problem) -> CutProgram:
    """The function, cut so that it fits, as little as possible.

    Raises:
      ValueError: it does not fit, whatever is cut.
    """
    search = _Search(problem)
    try:
        fits = search.run()
    except _Spent:
        fits = None
    if fits is None:
        fits = _least(problem, search.attempts)
        if fits.bytes > problem.memory:
            raise ValueError(_refusal(problem, fits))
    return fits.program


def _least(problem: Problem, attempts: list[Attempt]) -> Attempt:
    """What takes the least, compiled: what is told is enough, not an estimate."""
    compiled = 0
    while compiled < REFUSALS:
        least = min(attempts, key=lambda attempt: attempt.bytes)
        if least.took is not None:
            return least
        attempts.remove(least)
        kept = most_kept(least.program).bytes
        if least.bytes <= kept:
            # Only what it keeps is known, for which it need not be in so few pieces.
            attempts.append(_smallest(problem, least.way, kept))
        else:
            took = problem.took(least.program, math.inf)
            attempts.append(least._replace(took=took))
            compiled += 1
    every = (attempt for attempt in attempts if attempt.took is not None)
    return min(every, key=lambda attempt: attempt.bytes)


def _smallest(problem: Problem, way: Way, kept: int) -> Attempt:
    """An attempt whose shards take little beside what is kept."""
    followed = Followed(problem.uncut, way.axes, way.partial)
    count = followed.fewest(kept / SMALL) or followed.most
    program = problem.make(problem.points(way.axes, count), way.partial, way.keeps)
    held = estimated(program, problem.uncut.in_loops)
    return Attempt(way, count, program, held._replace(bytes=max(held.bytes, kept + 1)))


class _Search:
    """The attempts to cut a function so that it fits.

    Attributes:
      attempts: what was cut so far.
    """

    def __init__(self, problem: Problem) -> None:
        self.attempts: list[Attempt] = []
        self._problem, self._memory = problem, problem.memory
        self._analyses = self._compiles = 0
        self._scale_of_whole = 1.0  # What XLA takes of its estimate.

    def run(self) -> Attempt | None:
        """The first attempt that fits."""
        given = frozenset(
            (k, axis)
            for k, row in enumerate(self._problem.asked)
            for axis, points in enumerate(row)
            if isinstance(points, Auto)
        )
        if fits := self._as_it_is(given):
            return fits
        ways: Sequence[Axes] = [given] if given else self._problem.ways(given)
        for _ in range(MOST_AXES):
            before = len(self.attempts)
            for axes in ways:
                if fits := self._cut(axes):
                    return fits
            if len(self.attempts) == before:
                break
            # What holds the least is cut along a further class.
            least = min(self.attempts[before:], key=lambda attempt: attempt.bytes)
            ways = self._problem.ways(least.way.axes)[:FURTHER]
        return None

    def _as_it_is(self, given: Axes) -> Attempt | None:
        """The function with the cuts that are given, and no others, if it fits."""
        asked = self._problem.points(given, 1)
        is_cut = any(points for row in asked for points in row)
        for keeps in (True, False) if is_cut else (True,):
            way = Way(given, self._problem.partial, keeps)
            attempt = self._estimated(way, int(bool(given) or not is_cut))
            if is_cut or self._may_fit(attempt):
                attempt = self._compiled(attempt)
            self.attempts.append(attempt)
            if self._fits(attempt):
                return attempt
            if attempt.took is not None:
                scale = attempt.took / max(attempt.held.bytes, 1)
                self._scale_of_whole = min(max(scale, 1.0), DOUBTFUL)
        return None

    def _may_fit(self, whole: Attempt) -> bool:
        """Whether a function that is not cut may fit, and compiles in a short time."""
        graph, rules = whole.program.graph, whole.program.analysis.rules
        room = self._memory
        if self._problem.uncut.in_loops:
            # A large result is made in the memory of the function's results.
            room += sum(nbytes(v) for v in graph.outputs if isinstance(v, Value))
        stored = (
            nbytes(value)
            for node in graph.nodes
            if not (rules[node.number].cheap or node.primitive in COMBINERS)
            for value in node.outs
            if value not in graph.outputs
        )
        is_quick = len(graph.nodes) <= QUICK or whole.bytes <= self._memory
        return is_quick and max(stored, default=0) <= room

    def _cut(self, axes: Axes) -> Attempt | None:
        """The function with these axes cut, in about the fewest pieces that fit."""
        way = Way(axes, self._problem.partial, keeps=True)
        followed = Followed(self._problem.uncut, axes, way.partial)
        # Where no number is seen to fit, what the whole holds is divided.
        share = math.ceil(self.attempts[0].bytes / self._memory)
        room = self._memory / self._scale_of_whole
        count = followed.fewest(room) or min(share, followed.most)
        program = self._program(way, count)
        costly = bool(program.analysis.costly)
        # What costs time is kept for later stages, where this leaves room for shards.
        if not costly or 2 * most_kept(program).bytes <= self._memory:
            if fits := self._fewest(way, followed, count, program):
                return fits
            # More pieces may keep more.
            program = self.attempts[-1].program
            costly = bool(program.analysis.costly)
        if costly:
            way = way._replace(keeps=False)
            program = self._program(way, count)
            if fits := self._fewest(way, followed, count, program):
                return fits
        # In self-attention, say, sums over the keys keep the product for a later stage.
        if way.partial and 2 * most_kept(program).bytes > self._memory:
            way = Way(axes, partial=False, keeps=False)
            followed = Followed(self._problem.uncut, axes, way.partial)
            fewest = followed.fewest(self._memory)
            if fewest is not None:
                return self._fewest(way, followed, fewest, self._program(way, fewest))
        return None

    def _fewest(
        self, way: Way, followed: Followed, count: int, program: CutProgram
    ) -> Attempt | None:
        """An attempt that fits, in about the fewest pieces.

        Args:
          way: how the function is cut.
          followed: these cuts.
          count: the number of pieces that is tried first.
          program: the function in so many pieces.
        """
        kept = most_kept(program)
        if kept.bytes > self._memory:
            # It is as much in any number of pieces.
            self.attempts.append(Attempt(way, count, program, kept))
            return None
        fits: Attempt | None = None
        tried: dict[int, float] = {}
        scale = 1.0
        while True:
            attempt = self._estimated(way, count, program)
            if fits or scale * attempt.bytes <= DOUBTFUL * self._memory:
                attempt = self._compiled(attempt)
                scale = attempt.bytes / max(attempt.held.bytes, 1)
            self.attempts.append(attempt)
            tried[count] = scale * attempt.held.bytes
            if self._fits(attempt):
                fits = attempt
                if attempt.bytes >= ROOMY * self._memory:
                    break
            pieces = _pieces(followed, tried, kept.bytes, self._memory)
            if pieces is None or pieces in tried or len(tried) == TRIES:
                break
            if fits and pieces >= fits.pieces:
                break
            count = pieces
            program = self._program(way, count)
        return fits

    def _program(self, way: Way, count: int) -> CutProgram:
        """The function in so many pieces."""
        if self._analyses == ANALYSES:
            raise _Spent
        self._analyses += 1
        self._problem.tell(f"in {count:,} pieces" if count > 1 else "as it is")
        asked = self._problem.points(way.axes, count)
        return self._problem.make(asked, way.partial, way.keeps)

    def _estimated(
        self, way: Way, count: int, program: CutProgram | None = None
    ) -> Attempt:
        program = program or self._program(way, 1)
        held = estimated(program, self._problem.uncut.in_loops)
        return Attempt(way, count, program, held)

    def _compiled(self, attempt: Attempt) -> Attempt:
        if self._compiles == COMPILES:
            raise _Spent
        self._compiles += 1
        took = self._problem.took(attempt.program, self._memory)
        return attempt._replace(took=took)

    def _fits(self, attempt: Attempt) -> bool:
        return attempt.took is not None and attempt.took <= self._memory


def _pieces(
    followed: Followed, tried: Mapping[int, float], kept: int, memory: int
) -> int | None:
    """About the fewest pieces that fit; None if no number seems to.

    Shards take a constant, at least what is kept, and as many times more than is
    followed. Two numbers of pieces give both.

    Args:
      followed: the cuts.
      tried: the numbers of pieces -> the bytes that they take.
      kept: the bytes that are kept.
      memory: the bytes that they may take.
    """
    (count, took), *before = reversed([*tried.items()])
    held = followed.held(count)
    times, constant = (took - kept) / max(held, 1), float(kept)
    for fewer, other in before[:1]:
        if fewer < count and took > HOPELESS ** math.log2(count / fewer) * other:
            # A few more pieces may need one more stage.
            return min(4 * count, followed.most) if count < 2 * fewer else None
        if (more := followed.held(fewer)) != held:
            times = max((other - took) / (more - held), 0)
            constant = took - times * held
    pieces = followed.fewest((memory - constant) / max(times, 1e-9))
    if pieces is None or pieces in tried:
        # Of what is followed, a part is the constant: what is kept.
        pieces = math.ceil(count * (took - kept) / max(memory - kept, 1))
    too_few = max((n for n, taken in tried.items() if taken > memory), default=0)
    return min(max(pieces, too_few + math.ceil(too_few / 8), 1), followed.most)


def _refusal(problem: Problem, refused: Attempt) -> str:
    """Names the least that any way takes, and what would help."""
    (largest, shape, source, is_kept), count = refused.held[1:], refused.pieces
    if refused.bytes > 2 * refused.held.bytes:
        largest = refused.bytes - refused.held.bytes
        shape, source, is_kept = "scratch memory of XLA's kernels", "", False
    pieces, remedy = "as a whole", "" if problem.finds else ", or cut other axes"
    if count > 1:
        pieces = f"in {count:,} pieces"
    elif not count:
        pieces = "in the pieces that in_slices gives"
        remedy = ", or cut into more pieces: AUTO is as many as it takes"
    place = f" made at {source}" if source else ""
    if is_kept:
        place += ", kept for later stages"
        if largest > IN_MEMORY and not problem.uncut.in_loops:
            remedy += ", or a folder as scratch"
    value = f", of it {size(largest)} in {shape}{place}" if largest else ""
    exact = f" ({refused.bytes:,} bytes)" if refused.bytes >= 1024 else ""
    enough = math.ceil(1.02 * refused.bytes)  # Other pieces may take a little more.
    return (
        f"memory={size(problem.memory)} is too little: {pieces} the function still "
        f"holds {size(refused.bytes)}{exact} at once{value}. "
        f"Pass memory={enough} or more{remedy}."
    )
