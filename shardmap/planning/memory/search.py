"""Finds along which axes, and into how many pieces, a function fits into memory.

The function as it is comes first. Then the loop classes are ranked, see `loops`, and
the best that fits is cut: an estimate gives the number of pieces, and XLA says what the
largest shards take, which corrects it once or twice.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmap.planning.engine.keys import nbytes
from shardmap.planning.in_slices import Asked, cut_points
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.memory.compiled import (
    estimated,
    largest_shard,
)
from shardmap.planning.memory.held import Peak
from shardmap.planning.memory.loops import MOST_AXES, Axes, Followed, Uncut, ranked
from shardmap.planning.run.cut_program import IN_MEMORY, CutProgram
from shardmap.units import Auto, size

ATTEMPTS = 3
"""The most classes of axes that are tried, each with those that are cut already."""

COMPILES = 3
"""How often the number of pieces is corrected by what XLA says, and once more."""

ESTIMATES = 5
"""How often it is corrected by estimates, before each of these times."""

HOPELESS = 1.1
"""Shards that are estimated to take so many times the memory are not compiled."""

ROOMY = 0.6
"""Shards that take less than this part of the memory are made larger."""

MOST_PIECES = 2**16
"""The most pieces of an axis."""

SCANNED = (4, 16, 64, 256)
"""The numbers of pieces that are tried if the most pieces do not fit."""

QUICK = 128
"""A function of at most so many equations is compiled whole to see if it fits."""

MANY_SHARDS = 1024
"""A program of more shards is compared with one that keeps nothing."""

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
      took: compiles shards, and returns the bytes that they take.
      chunks: (argument, axis) -> where its chunks begin; None: it has none.
      times_read: returns how often pieces read each chunk, on average.
      started: when the search began.
    """

    make: Callable[[Asked, bool, bool], CutProgram]
    uncut: Uncut
    asked: Asked
    finds: bool
    partial: bool
    memory: int
    took: Callable[[CutProgram], int]
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


class TooLittle(Exception):
    """A way does not fit.

    Attributes:
      least: what it holds.
      axes: the axes that are cut.
      count: the number of their pieces; 0 if that is given.
      program: the cut function.
    """

    def __init__(
        self, least: Peak, axes: Axes, count: int, program: CutProgram
    ) -> None:
        super().__init__(least, axes, count)
        self.least, self.axes, self.count = least, axes, count
        self.program = program


def program_within(problem: Problem) -> CutProgram:
    """The function, cut so that it fits, as little as possible.

    Raises:
      ValueError: it does not fit, whatever is cut.
    """
    given = frozenset(
        (k, axis)
        for k, row in enumerate(problem.asked)
        for axis, points in enumerate(row)
        if isinstance(points, Auto)
    )
    refused: list[TooLittle] = []
    try:
        return _as_it_is(problem, given)
    except TooLittle as error:
        refused.append(error)
    ways: Sequence[Axes] = [given] if given else _by_cost(problem, given)
    for _ in range(MOST_AXES):
        here: list[TooLittle] = []
        for axes in ways:
            try:
                return _kept_or_not(problem, axes)
            except TooLittle as error:
                here.append(error)
        if not here:
            break
        # What holds the least is cut along further axes.
        refused += here
        best = min(here, key=lambda error: error.least.bytes)
        ways = _by_cost(problem, best.axes)
    least = min(refused, key=lambda error: error.least.bytes)
    if least.program.num_shards <= MANY_SHARDS:
        # What is told is enough, not an estimate.
        took = max(problem.took(least.program), least.least.bytes)
        least.least = least.least._replace(bytes=took)
    raise ValueError(_refusal(problem, least))


def _by_cost(problem: Problem, begin: Axes) -> Sequence[Axes]:
    """A few ways to cut one class more, the one that moves the fewest bytes first."""
    uncut, memory = problem.uncut, problem.memory
    classes = uncut.classes()
    if not problem.finds:
        # What no argument has may be cut nevertheless.
        count = len(problem.asked)
        classes = [axes for axes in classes if all(k >= count for k, _ in axes)]

    def times_read(axes: Axes, count: int) -> float:
        return problem.times_read(problem.points(axes, count))

    every = ranked(uncut, begin, classes, memory, problem.partial, times_read)
    return [followed.axes for _, followed in every[:ATTEMPTS]]


def _kept_or_not(problem: Problem, axes: Axes) -> CutProgram:
    """The function with these axes cut: with what costs the least time, if it fits.

    Raises:
      TooLittle: it does not fit.
    """
    refused: list[TooLittle] = []
    kept: CutProgram | None = None
    try:
        kept = _fitted(problem, axes, problem.partial, keeps=True)
    except TooLittle as error:
        refused.append(error)
    if kept is not None and kept.num_shards <= MANY_SHARDS:
        return kept
    # What is kept may leave room for tiny shards only.
    if (kept or refused[0].program).analysis.costly:
        try:
            again = _fitted(problem, axes, problem.partial, keeps=False)
        except TooLittle as error:
            refused.append(error)
        else:
            return min(filter(None, (again, kept)), key=lambda made: made.num_shards)
    if kept is not None:
        return kept
    # In self-attention, say, sums over the keys keep the product for a later stage.
    if problem.partial and len(refused[-1].program.stages) > 1:
        try:
            return _fitted(problem, axes, partial=False, keeps=False)
        except TooLittle as error:
            refused.append(error)
    raise min(refused, key=lambda error: error.least.bytes)


def _as_it_is(problem: Problem, given: Axes) -> CutProgram:
    """The function with the cuts that are given, and no others.

    Raises:
      TooLittle: it does not fit, or it would take long to find out.
    """
    asked = problem.points(given, 1)
    is_cut = any(points for row in asked for points in row)
    for keeps in (True, False) if is_cut else (True,):
        program = problem.make(asked, problem.partial, keeps)
        least = estimated(program, problem.uncut.in_loops)
        if is_cut or _may_fit(problem, program, least):
            problem.tell("as it is")
            took = problem.took(program)
            if took <= problem.memory:
                return program
            least = least._replace(bytes=took)
    raise TooLittle(least, given, 1 if given or not is_cut else 0, program)


def _may_fit(problem: Problem, program: CutProgram, least: Peak) -> bool:
    """Whether a function that is not cut might fit, and compiles in a short time."""
    steps, room = 0, problem.memory
    rules = program.analysis.rules
    for stage in program.stages:
        shard = largest_shard(stage)
        results = {ref.slot for ref in shard.recipe.static.outs if ref is not None}
        if problem.uncut.in_loops:
            # A large result is made in the memory of the function's results.
            room += sum(nbytes(each.value) for each in stage.results)
        elif shard.moved > problem.memory:
            return False
        nodes = {node.number: node for node in stage.backwards}
        for step in shard.recipe.static.steps:
            node = nodes[step.node]
            steps += 1
            if rules[step.node].cheap or node.primitive in COMBINERS:
                continue
            for slot, out in enumerate(node.outs, step.first):
                if slot not in results and nbytes(out) > room:
                    return False
    return steps <= QUICK or least.bytes <= problem.memory


class _Tried(NamedTuple):
    """A number of pieces, the program, and about what its shards hold."""

    pieces: int
    program: CutProgram
    held: Peak


def _fitted(problem: Problem, axes: Axes, partial: bool, keeps: bool) -> CutProgram:
    """The function with these axes cut, in about the fewest pieces that fit.

    Raises:
      TooLittle: it does not fit.
    """
    tries = _Tries(problem, axes, partial, keeps)
    most, count = tries.most, tries.count
    below, room = 1, float(problem.memory)
    found: CutProgram | None = None
    least: _Tried | None = None
    for _ in range(COMPILES + 1):
        tried = tries.fewest(count, below, room)
        if tried.held.bytes > HOPELESS * max(room, problem.memory):
            least = least or tried
            break
        if tried.program is found:
            break
        took = problem.took(tried.program)
        estimate = max(tried.held.bytes, 1)
        if took <= problem.memory:
            found = tried.program
            if took >= ROOMY * problem.memory or tried.pieces - below <= 1:
                break
            room = estimate * problem.memory / max(took, 1)
            count = max(math.ceil(tried.pieces * took / problem.memory), below + 1)
            if count > 0.9 * tried.pieces:
                break
        elif found is not None:
            break
        else:
            held = tried.held._replace(bytes=took)
            if took > estimate and took - estimate > held.largest:
                text = "scratch memory of XLA's kernels"
                held = Peak(took, took - estimate, text)
            if least is None or took < least.held.bytes:
                least = tried._replace(held=held)
            if tried.pieces >= most:
                break
            below = tried.pieces
            # Kernels may take as much for shorter pieces.
            room = problem.memory - (took - estimate)
            if room < problem.memory / 4:
                room = estimate * problem.memory / took
            count = min(math.ceil(1.1 * below * took / problem.memory), most)
            count = max(min(count, 16 * below), below + 1)
    if found is None:
        assert least is not None
        raise TooLittle(least.held, axes, least.pieces, least.program)
    return found


class _Tries:
    """Programs of one way to cut a function, by the number of pieces.

    Attributes:
      most: the most pieces.
      count: about the fewest that fit.
    """

    def __init__(
        self, problem: Problem, axes: Axes, partial: bool, keeps: bool
    ) -> None:
        self._problem, self._axes = problem, axes
        self.most = min(problem.uncut.most(axes), MOST_PIECES)
        followed = Followed(problem.uncut, axes, partial)
        self.count = min(followed.fewest(problem.memory) or self.most, self.most)
        self._manner = partial, keeps
        self._known: dict[int, _Tried] = {}

    def at(self, count: int) -> _Tried:
        if count not in self._known:
            self._problem.tell(f"in {count:,} pieces")
            asked = self._problem.points(self._axes, count)
            program = self._problem.make(asked, *self._manner)
            held = estimated(program, self._problem.uncut.in_loops)
            self._known[count] = _Tried(count, program, held)
        return self._known[count]

    def fewest(self, count: int, below: int, room: float) -> _Tried:
        """About the fewest pieces whose shards hold as little as ``room``.

        Args:
          count: the number that is tried first.
          below: a number that is too small.
          room: the bytes.
        """
        fits: _Tried | None = None
        before: _Tried | None = None
        begin = below
        for _ in range(ESTIMATES):
            tried = self.at(count)
            if tried.held.bytes <= room:
                fits = tried
                if count - below <= max(1, count // 16):
                    break
            else:
                below = count
                if count >= self.most:
                    break
                if _is_as_large(tried, before, room):
                    return min(tried, self.at(self.most), key=_bytes)
                if _hardly_shrinks(tried, before, room):
                    return tried
            before = tried
            # The bytes are about proportional to the length of a piece.
            count = math.ceil(count * tried.held.bytes / max(room, 1))
            if fits is None:
                more = max(count, below + max(1, below // 4))
                count = min(more, 16 * below, self.most)
            elif below < count < fits.pieces - max(1, fits.pieces // 16):
                pass
            else:
                break
        if fits is None:
            # More pieces may take more, as what many shards return is combined.
            for count in SCANNED:
                if begin < count < self.most:
                    other = self.at(count)
                    if _is_as_large(other, tried, room):
                        return min(tried, other, key=_bytes)
                    tried = min(tried, other, key=_bytes)
                    if other.held.bytes <= room:
                        return other
        return fits or tried


def _bytes(tried: _Tried) -> int:
    return tried.held.bytes


def _is_as_large(tried: _Tried, before: _Tried | None, room: float) -> bool:
    """Whether a value that is too large is as large as it was in fewer pieces."""
    is_too_large = tried.held.largest > room
    return is_too_large and before is not None and before.held[1:] == tried.held[1:]


def _hardly_shrinks(tried: _Tried, before: _Tried | None, room: float) -> bool:
    """Whether two numbers of pieces show that no other fits.

    Shards hold about a constant, and besides what is divided among the pieces. If they
    hold more in more pieces, these combine what many shards return.
    """
    if before is None:
        return False
    fewer, more = sorted((before, tried), key=lambda each: each.pieces)
    if more.held.bytes > 1.05 * fewer.held.bytes:
        return False
    in_all = more.pieces * more.held.bytes - fewer.pieces * fewer.held.bytes
    return in_all > HOPELESS * room * (more.pieces - fewer.pieces)


def _refusal(problem: Problem, refused: TooLittle) -> str:
    """Names the least that any way takes, and what would help."""
    least, count = refused.least, refused.count
    pieces, remedy = "as a whole", "" if problem.finds else ", or cut other axes"
    if count > 1:
        pieces = f"in {count:,} pieces"
    elif not count:
        pieces = "in the pieces that in_slices gives"
        remedy = ", or cut into more pieces: AUTO is as many as it takes"
    place = f" made at {least.source}" if least.source else ""
    if least.is_kept:
        place += ", kept for later stages"
        if least.largest > IN_MEMORY and not problem.uncut.in_loops:
            remedy += ", or a folder as scratch"
    value = f", of it {size(least.largest)} in {least.shape}{place}"
    exact = f" ({least.bytes:,} bytes)" if least.bytes >= 1024 else ""
    held = f"{size(least.bytes)}{exact} at once" + value * bool(least.largest)
    enough = math.ceil(1.02 * least.bytes)  # Other pieces may take a little more.
    return (
        f"memory={size(problem.memory)} is too little: {pieces} the function still "
        f"holds {held}. Pass memory={enough} or more{remedy}."
    )
