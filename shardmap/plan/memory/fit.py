"""Finds along which axes, and into how many pieces, a function fits into memory."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from shardmap._jax.types import ClosedJaxpr
from shardmap.plan.engine.keys import nbytes
from shardmap.plan.engine.nodes import Value
from shardmap.plan.in_slices import Asked, cut_points
from shardmap.plan.memory.liveness import Peak
from shardmap.plan.memory.plan_peak import (
    bytes_moved,
    compiled_bytes,
    cost_of,
    plan_peak,
)
from shardmap.plan.run.buffers import ARITY
from shardmap.plan.run.cut_program import IN_MEMORY, CutProgram
from shardmap.units import AUTO, Auto, size

MOST_AXES = 3
"""The most axes that are cut without ``in_slices``."""

LEAVES_TRIED = 8
"""The axes of at most this many arguments are tried, the largest first."""

SMALLER = 16
"""Values this many times smaller are tried only if larger ones do not help."""

COSTLIER = 16
"""Along axes that cost this many times more than the best one, nothing is kept."""

AXES_GROWN = 4
"""The number of the best axes, which are tried in more pieces."""

FIRST_PIECES = 8
"""The number of pieces into which an axis is cut first, to see what that saves."""

MOST_PIECES = 2**16
"""The most pieces of an axis that `AUTO` gives."""

FEW_STAGES = 64
"""So many stages cost no time of their own."""

STAGE_BYTES = 2**20
"""Each further stage takes about as long as moving so many bytes."""

MANY_SHARDS = 1024
"""A program of more shards is compared with one that keeps nothing."""

PROGRAMS_HELD = 4
"""The programs that were made last, which need not be made again to be returned."""

MOST_COMPILES = 3
"""How often cuts are chosen if compiled shards hold more than the model says."""


class _TooLittle(Exception):
    """The function does not fit into the memory."""


Make: TypeAlias = Callable[[Asked, bool, bool, bool, bool], CutProgram]
"""Cuts the function. Takes points, `Fit`'s ``partial``, whether values are kept that
could be recomputed, whether a few steps may represent all of an unrolled loop, and
whether to find out which values are worth keeping."""

Chunks: TypeAlias = Callable[[int, int], tuple[int, ...] | None]
"""(operand, axis) -> where its chunks begin, except the first; None: it has none."""


class _Found(NamedTuple):
    """What is known of a program.

    Attributes:
      how: the arguments of `Make` that make it.
      peak: what its largest shard holds.
      partial: whether reduced axes may be cut.
      moved: about the bytes that all shards read and write, with the chunks that they
        read in part, and `STAGE_BYTES` for each stage after `FEW_STAGES`.
      is_plain: whether it would be the same if they may not.
      is_exact: whether ``peak`` and ``moved`` are of all stages. They may be more.
    """

    how: tuple[Any, ...]
    peak: Peak
    partial: bool
    moved: int
    is_plain: bool
    is_exact: bool

    @property
    def cost(self) -> int:
        return cost_of(self.peak, self.moved)


class Fit:
    """Finds cuts with which the shards of a function fit into memory.

    If reduced axes may be cut, it tries both ways and takes the cheaper one: if one
    array is on both sides of a product, as in self-attention, the product is kept if
    the summed axis is cut.

    Args:
      jaxpr: the function.
      make: cuts the function.
      partial: whether reduced axes may be cut.
      memory: the bytes that shards may take.
      finds: whether it finds the axes too; otherwise only the number of pieces.
      in_loops: whether shards are bodies of loops in one program.
      chunks: where the chunks of operands begin.
      times_read: returns how often pieces read each chunk, on average.
      begins: returns the values inside at which cuts can begin. They are tried if the
        function does not fit with cuts of the operands. Their axes follow those of the
        operands.
    """

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        make: Make,
        partial: bool,
        memory: int,
        finds: bool,
        in_loops: bool = False,
        chunks: Chunks = lambda operand, axis: None,
        times_read: Callable[[Asked], float] = lambda asked: 1,
        begins: Callable[[], Sequence[Value]] = tuple,
    ) -> None:
        self._jaxpr, self._chunks, self._times_read = jaxpr, chunks, times_read
        # Holding every program that was tried would take much memory.
        self._make = functools.lru_cache(PROGRAMS_HELD)(make)
        self._values: list[Any] = [*jaxpr.jaxpr.invars]
        self._begins = begins
        self._choices = [True, False] if partial else [False]
        self._memory, self._finds, self._in_loops = memory, finds, in_loops
        self._refusal = math.inf, ""  # The least bytes that were refused, and why.
        # Whether a few steps stand for all of a loop while cuts are tried.
        self._samples = True
        self._known: dict[tuple[Any, ...], _Found] = {}
        # By cuts that are `AUTO`, and whether values are kept: pieces -> peak.
        self._peaks: dict[tuple[Asked, bool], dict[int, Peak]] = {}

    def axes(self) -> Asked:
        """The axes to cut, as few as possible, as `AUTO`.

        If it fits along several axes, the one with the lowest `_Found.cost` is taken.

        Raises:
          ValueError: the function does not fit, whatever is cut.
        """
        asked = whole(self._jaxpr)
        try:
            return self._axes(asked)
        except ValueError as error:
            return self._inside(asked, error)[: len(asked)]

    def program(self, asked: Asked) -> CutProgram:
        """The function, with as few pieces as fit where cuts are `AUTO`.

        Args:
          asked: the cuts, to which others are added if need be and it finds them.

        Raises:
          ValueError: it does not fit in these pieces, or in any number of them.
        """
        try:
            return self._kept_or_recomputed(asked)
        except ValueError as error:
            refusal = error
        if self._finds:
            # The model found too few axes: the bytes of the compiler decide.
            with contextlib.suppress(ValueError):
                return self._kept_or_recomputed(self._axes(asked, ask_compiler=True))
        return self._kept_or_recomputed(self._inside(asked, refusal))

    def _kept_or_recomputed(self, asked: Asked) -> CutProgram:
        """The program that keeps values, or if this does not fit, recomputes them.

        It also recomputes them if what is kept leaves room for tiny shards only.

        Raises:
          ValueError: neither fits.
        """
        found: list[CutProgram] = []
        refusal = ""
        for keeps in (True, False):
            try:
                found.append(self._program(asked, keeps))
            except _TooLittle as error:
                refusal = str(error)
            if found and found[0].num_shards <= MANY_SHARDS:
                break
        if not found:
            raise ValueError(refusal)
        return min(found, key=lambda made: made.num_shards // MANY_SHARDS)

    def _inside(self, asked: Asked, error: ValueError) -> Asked:
        """``asked``, and the axes of values inside that are to be cut, as `AUTO`.

        Args:
          asked: the cuts of the operands, with which the function does not fit.
          error: says so. It is raised if there are no such axes.
        """
        begins = self._begins()
        if not begins:
            raise error
        self._values = [*self._jaxpr.jaxpr.invars, *begins]
        more = (*asked, *(((),) * len(value.shape) for value in begins))
        return self._axes(more)

    def _best(
        self,
        asked: Asked,
        keeps: bool,
        measures: bool = True,
        limit: float = math.inf,
        cost: float = math.inf,
    ) -> _Found:
        """These cuts with or without cut reductions: what fits, or takes the least.

        That way is tried first the next time.

        Args:
          asked: the cuts.
          keeps: whether values may be kept that could be recomputed.
          measures, limit, cost: as for `_found`.
        """
        found = []
        is_cut = any(points for row in asked for points in row)
        for partial in self._choices if is_cut else self._choices[:1]:
            given = asked, partial, keeps, self._samples, measures, limit, cost
            found.append(self._found(*given))
            if found[-1].peak.bytes <= self._memory or found[-1].is_plain:
                break
            limit = min(limit, found[-1].peak.bytes)
        best = min(found, key=lambda each: each.peak.bytes)
        self._choices.sort(key=lambda partial: partial != best.partial)
        return best

    def _found(
        self,
        asked: Asked,
        partial: bool,
        keeps: bool,
        samples: bool,
        measures: bool = True,
        limit: float = math.inf,
        cost: float = math.inf,
    ) -> _Found:
        """What is known of the program that `Make` makes of these arguments.

        Args:
          measures: whether to find out which values are worth keeping.
          limit: the peak need not be exact if it is larger than this.
          cost: nothing need be exact if it costs more than this.
        """
        axes = tuple(
            (k, axis)
            for k, row in enumerate(asked)
            for axis, points in enumerate(row)
            if points
        )
        # Only what was measured is kept without need.
        key = partial, keeps and measures, samples, measures
        # If no cut takes effect, more pieces do not help.
        for name in ((asked, *key), (axes, *key)):
            known = self._known.get(name)
            if known and (
                known.is_exact or known.peak.bytes > limit or known.cost > cost
            ):
                return known
        made = self._make(asked, *key)
        is_plain = partial and len(made.stages) < 2 and not made.analysis.reductions
        ratio = made.analysis.step_ratio * self._times_read(asked)
        peak = plan_peak(made, self._in_loops, limit, cost / ratio**2)
        stages = max(len(made.stages) * made.analysis.step_ratio - FEW_STAGES, 0)
        moved = math.ceil(bytes_moved(made) * ratio + STAGE_BYTES * stages)
        is_exact = peak.bytes <= limit and cost_of(peak, moved) <= cost
        found = _Found((asked, *key), peak, partial, moved, is_plain, is_exact)
        self._known[axes if made.num_shards == 1 else asked, *key] = found
        return found

    def _in_pieces(self, asked: Asked, count: int) -> Asked:
        """``asked`` with ``count`` pieces in place of `AUTO`."""
        return tuple(
            tuple(
                cut_points(count, value.aval.shape[axis], self._borders(k, axis))
                if isinstance(points, Auto)
                else points
                for axis, points in enumerate(row)
            )
            for k, (row, value) in enumerate(zip(asked, self._values, strict=False))
        )

    def _most(self, asked: Asked) -> int:
        """The most pieces that `AUTO` may give; 0 if no cut is `AUTO`."""
        lengths = [self._values[k].aval.shape[axis] for k, axis in _auto_axes(asked)]
        return max(min(max(lengths), MOST_PIECES), 1) if lengths else 0

    def _axes(self, asked: Asked, ask_compiler: bool = False) -> Asked:
        """``asked``, and the axes to cut in addition, as few as possible.

        Raises:
          ValueError: the function does not fit, whatever is cut.
        """
        refusal = ""
        # Recomputing values usually costs less than cutting one more axis.
        for most, keeps in itertools.product(range(1, MOST_AXES + 1), (True, False)):
            try:
                return self._with_axes(asked, keeps, most, ask_compiler)
            except _TooLittle as error:
                refusal = str(error)
        raise ValueError(refusal)

    def _with_axes(
        self, asked: Asked, keeps: bool, most_axes: int, ask_compiler: bool
    ) -> Asked:
        count = 1
        # If the model finds no need for cuts, the bytes of the compiler decide.
        uncut = self._best(self._in_pieces(asked, count), keeps, measures=keeps)
        ask_compiler |= uncut.peak.bytes <= self._memory

        def held(each: Asked, count: int, limit: float = math.inf) -> _Found:
            pieces = self._in_pieces(each, count)
            # If nothing is kept without need, there is little to measure.
            found = self._best(pieces, keeps, measures=keeps, limit=limit)
            if found.is_exact:
                self._peaks.setdefault((each, keeps), {})[count] = found.peak
            # What the model finds too large is no smaller when it is compiled.
            if not ask_compiler or found.peak.bytes > self._memory:
                return found
            took = compiled_bytes(self._make(*found.how), self._in_loops)
            return found._replace(peak=found.peak._replace(bytes=took))

        least = held(asked, count).peak
        for _ in range(most_axes):
            if least.bytes <= self._memory:
                break
            count = max(count, FIRST_PIECES)
            rough: dict[Asked, _Found] = {}
            saving: dict[Asked, _Found] = {}
            grown: list[tuple[Asked, Peak, int]] = []
            fits = False
            for more in self._candidates(asked):
                saving |= self._savings(more, count, keeps, held, rough, least)
                better = [
                    each for each in saving if saving[each].peak.bytes < least.bytes
                ]
                better.sort(key=lambda each: saving[each].cost)
                grown.clear()
                for each in better[:AXES_GROWN]:
                    begin = held(each, count).peak
                    grown.append((each, *self._grown(each, begin, count, held)))
                    if fits := grown[-1][1].bytes <= self._memory:
                        break
                if fits:
                    break
            if not grown:
                break
            asked, least, count = grown[-1 if fits else 0]
        # More pieces may take more, and still more of them less again.
        most, tried, fits = self._most(asked), count, least.bytes <= self._memory
        while not fits:
            if tried >= most or most_axes < MOST_AXES:
                raise self._too_little(least, asked, count)
            tried = min(2 * tried, most)
            fits = held(asked, tried, self._memory).peak.bytes <= self._memory
        return asked

    def _savings(
        self,
        candidates: Sequence[Asked],
        count: int,
        keeps: bool,
        held: Callable[..., _Found],
        rough: dict[Asked, _Found],
        uncut: Peak,
    ) -> dict[Asked, _Found]:
        """What each candidate holds, found out in detail for the best ones only.

        Args:
          candidates: the cuts.
          count: the number of pieces.
          keeps: whether values may be kept; then costly candidates are left out.
          held: finds out the details.
          rough: what candidates hold if nothing is kept. These are added to it.
          uncut: what is held without the axis that the candidates cut in addition.
        """
        if len(candidates) == 1:
            return {each: held(each, count) for each in candidates}
        # To keep more values usually takes more memory. To find out which takes time.

        def limit() -> float:
            costs = [f.cost for f in rough.values() if f.peak.bytes < uncut.bytes]
            return (COSTLIER if keeps else 1) * min(costs, default=math.inf)

        for each in candidates:
            given = self._in_pieces(each, count), keeps
            rough[each] = self._best(*given, measures=False, cost=limit())
        found: dict[Asked, _Found] = {}
        for each in sorted(candidates, key=lambda each: rough[each].cost):
            if keeps and rough[each].cost > limit():
                break
            is_best = all(rough[each].cost < other.cost for other in found.values())
            found[each] = held(each, count) if is_best else rough[each]
        return found

    def _grown(
        self, asked: Asked, least: Peak, count: int, held: Callable[..., _Found]
    ) -> tuple[Peak, int]:
        """Tries more pieces as long as they help; returns the peak and the number."""
        most = self._most(asked)
        while least.bytes > self._memory and count < most:
            more = min(4 * count, most)
            found = held(asked, more, least.bytes).peak
            # The totals of very many pieces may take more than shorter pieces save.
            if found.bytes >= least.bytes:
                break
            least, count = found, more
        return least, count

    def _borders(self, k: int, axis: int) -> tuple[int, ...] | None:
        """Where the chunks of an axis begin; values inside have none."""
        return self._chunks(k, axis) if k < len(self._jaxpr.in_avals) else None

    def _candidates(self, asked: Asked) -> Iterator[list[Asked]]:
        """``asked`` with one axis more, those of far smaller values in later lists."""
        operands = len(self._jaxpr.in_avals)
        numbers = range(operands if len(asked) > operands else 0, len(asked))
        sizes = {k: nbytes(self._values[k]) for k in numbers}
        left = sorted(numbers, key=lambda k: -sizes[k])[:LEAVES_TRIED]
        while left:
            largest = [k for k in left if SMALLER * sizes[k] >= sizes[left[0]]]
            left = left[len(largest) :]
            yield [
                (
                    *asked[:k],
                    (*asked[k][:axis], AUTO, *asked[k][axis + 1 :]),
                    *asked[k + 1 :],
                )
                for k in largest
                for axis, length in enumerate(self._values[k].aval.shape)
                if length > 1 and asked[k][axis] == ()
            ]

    def _program(self, asked: Asked, keeps: bool, first: int = 1) -> CutProgram:
        most, room = self._most(asked), self._memory
        for _ in range(MOST_COMPILES if most else 1):
            count = self._fewest(asked, most, keeps, first, room)
            pieces = self._in_pieces(asked, count)
            found = self._best(pieces, keeps)
            program = self._make(*found.how)
            took = compiled_bytes(program, self._in_loops)
            kernels = took - found.peak.bytes
            if took <= self._memory:
                if program.analysis.step_ratio > 1:
                    found = self._found(pieces, found.partial, keeps, False)
                    if found.peak.bytes + kernels > self._memory:
                        self._samples = False
                        self._peaks.clear()
                        return self._program(asked, keeps, count)
                    program = self._make(*found.how)
                program.kernel_bytes = kernels
                return program
            least = found.peak._replace(bytes=took)
            if kernels > least.largest:
                least = Peak(took, kernels, "scratch memory of XLA's kernels")
            refusal = self._too_little(least, asked, count)
            # Kernels may take as much for shorter pieces. If that leaves no room, the
            # bytes are assumed to be proportional to the length of a piece.
            first, room = count + 1, self._memory - kernels
            if room <= 0:
                first, room = math.ceil(1.1 * count * took / self._memory), self._memory
        raise refusal

    def _fewest(
        self, asked: Asked, most: int, keeps: bool, first: int, room: int
    ) -> int:
        """The fewest pieces that fit into ``room``, or up to a sixteenth more.

        Args:
          asked: the cuts.
          most: the most pieces.
          keeps: whether values may be kept that could be recomputed.
          first: the fewest pieces.
          room: the bytes that the model may count.
        """

        peaks = self._peaks.setdefault((asked, keeps), {})

        def held(count: int) -> Peak:
            if count not in peaks:
                pieces = self._in_pieces(asked, count)
                peaks[count] = self._best(pieces, keeps, measures=keeps).peak
            return peaks[count]

        fitting = [n for n, peak in peaks.items() if peak.bytes <= room and n >= first]
        count = min(fitting, default=max([min(first, most), *peaks]))
        below = max([n for n in peaks if first <= n < count], default=first - 1)
        growth, level = 1.0, ARITY
        while (least := held(count)).bytes > room:
            if count >= most:
                raise self._too_little(least.plus(self._memory - room), asked, count)
            # The bytes are about proportional to the length of a piece.
            growth *= 1.25
            times = min(max(least.bytes / room, growth), 16)
            # Beyond a power of it, one more level of a fold holds partial results.
            while level <= count:
                level *= ARITY
            more = min(max(int(count * times), count + 1), level, most)
            below, count = count, more
        halves = False
        while count - below > (step := max(1, count // 16)):
            tried = math.isqrt(below * count)
            if below in peaks and not halves:
                # The bytes are about ``fixed + piece / n`` for ``n`` pieces.
                gap = peaks[below].bytes - peaks[count].bytes
                piece = gap / (1 / below - 1 / count)
                fixed = peaks[count].bytes - piece / count
                tried = math.ceil(piece / max(room - fixed, 1))
            tried = min(max(tried, below + 1), count - step)
            if held(tried).bytes <= room:
                count = tried
            else:
                below = tried
            halves = not halves
        return count

    def _too_little(self, least: Peak, asked: Asked, count: int) -> _TooLittle:
        """The error that names the least that any way tried so far takes."""
        pieces, remedy = "as a whole", "" if self._finds else ", or cut other axes"
        if count > 1:
            axes = len(_auto_axes(asked))
            pieces = f"in {count:,} pieces"
            if axes > 1:
                pieces = f"in up to {count:,} pieces along each of {axes} axes"
        elif not count:
            pieces = "in the pieces that in_slices gives"
            remedy = ", or cut into more pieces: AUTO is as many as it takes"
        place = f" made at {least.source}" if least.source else ""
        if least.is_kept:
            place += ", kept for later stages"
            if least.largest > IN_MEMORY and not self._in_loops:
                remedy += ", or a folder as scratch"
        value = f", of it {size(least.largest)} in {least.shape}{place}"
        exact = f" ({least.bytes:,} bytes)" if least.bytes >= 1024 else ""
        held = f"{size(least.bytes)}{exact} at once" + value * bool(least.largest)
        message = (
            f"memory={size(self._memory)} is too little: {pieces} the function still "
            f"holds {held}. Pass memory={least.bytes} or more{remedy}."
        )
        self._refusal = min(self._refusal, (least.bytes, message))
        return _TooLittle(self._refusal[1])


def _auto_axes(asked: Asked) -> set[tuple[int, int]]:
    """The axes that are `AUTO`, by operand."""
    return {
        (k, axis)
        for k, row in enumerate(asked)
        for axis, points in enumerate(row)
        if isinstance(points, Auto)
    }


def whole(jaxpr: ClosedJaxpr) -> Asked:
    """No cuts."""
    return tuple(((),) * len(aval.shape) for aval in jaxpr.in_avals)
