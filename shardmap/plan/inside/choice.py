"""Into how many pieces, and along which axes, so that a program fits into memory."""

from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import jax

from shardmap._jax.types import ClosedJaxpr
from shardmap.plan.in_slices import Asked, cut_points, cuts_at
from shardmap.plan.inside.effects import happening
from shardmap.plan.inside.liveness import Peak, nbytes, peak
from shardmap.plan.inside.stage_loops import run_in_loops
from shardmap.plan.lax.table import analysed
from shardmap.plan.run.cut_program import CutProgram
from shardmap.units import AUTO, Auto, size

MOST_AXES = 3
"""How many axes are cut at the most where nobody says which."""

MOST_PIECES = 2**16
"""Into how many pieces an axis is cut at the most where nobody says how many."""

TRIED = 8
"""Into how many pieces an axis is cut to see what that saves."""


class _TooLittle(Exception):
    """It does not fit into the memory that it may take."""


T = TypeVar("T")


def in_memory(choose: Callable[[bool], T]) -> T:
    """What is chosen so that it fits.

    Args:
      choose: takes whether what could be computed again may be kept instead. If nothing
        fits with what is worth keeping, it is asked for what fits without.

    Raises:
      ValueError: nothing fits at all.
    """
    try:
        return choose(True)
    except _TooLittle:
        pass
    try:
        return choose(False)
    except _TooLittle as error:
        raise ValueError(str(error)) from None


def cut_jaxpr(
    jaxpr: ClosedJaxpr, asked: Asked, partial: bool, keeps: bool = True
) -> CutProgram:
    """A jaxpr, cut.

    Args:
      jaxpr: what is cut.
      asked: the cuts.
      partial: whether reduced axes are cut.
      keeps: whether what could be computed again may be kept instead.

    Raises:
      Refused: it has an effect that is not one of the host.
    """
    cuts = cuts_at(asked)
    names = [f"operand {k}" for k in range(len(asked))]
    in_tree, out_tree = (
        jax.tree.structure([0] * len(avals))
        for avals in (jaxpr.in_avals, jaxpr.out_avals)
    )
    analysis = analysed(jaxpr, cuts, partial, effects=happening, keeps=keeps)
    return CutProgram(analysis, in_tree, out_tree, cuts, names)


Measure: TypeAlias = Callable[[CutProgram], Peak]
"""What a function that is cut takes."""


def loops_peak(made: CutProgram) -> Peak:
    """What it takes as loops in one program, besides its arguments and results."""
    structs = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in made.graph.inputs]
    loops = jax.make_jaxpr(lambda *leaves: run_in_loops(made, leaves, sampled=True))(
        *structs
    )
    return peak(loops.jaxpr)


class Model:
    """The memory that a function takes in pieces.

    Reduced axes are cut too, or are not: whatever takes less. Where one array stands on
    both sides of a product, as in self-attention, cutting what is summed over means to
    keep the product.
    """

    def __init__(
        self, jaxpr: ClosedJaxpr, partial: bool, measure: Measure, keeps: bool
    ) -> None:
        self._jaxpr, self._measure, self._keeps = jaxpr, measure, keeps
        self._choices = [True, False] if partial else [False]
        self._known: dict[tuple[Asked, bool], Peak] = {}

    def best(self, asked: Asked, enough: int = 0) -> tuple[Peak, bool]:
        """The least that these cuts take, and whether reduced axes are cut for that.

        The first of the two that takes no more than ``enough`` will do. It is tried
        first the next time.
        """
        found = []
        for partial in self._choices:
            found.append((self._peak(asked, partial), partial))
            if found[-1][0].bytes <= enough:
                break
        least = min(found, key=lambda each: each[0].bytes)
        self._choices.sort(key=lambda partial: partial != least[1])
        return least

    def _peak(self, asked: Asked, partial: bool) -> Peak:
        key = asked, partial
        if key not in self._known:
            made = cut_jaxpr(self._jaxpr, asked, partial, self._keeps)
            self._known[key] = self._measure(made)
        return self._known[key]


Chunks: TypeAlias = Callable[[int, int], tuple[int, ...] | None]
"""Where the chunks of an axis of an operand begin, but for the first; None: in none."""


def resolved(
    jaxpr: ClosedJaxpr,
    asked: Asked,
    partial: bool,
    memory: int | None,
    measure: Measure = loops_peak,
    keeps: bool = True,
    chunks: Chunks = lambda operand, axis: None,
) -> tuple[Asked, bool]:
    """``asked`` with as few pieces as fit where they are to be chosen.

    Returns:
      The cuts, and whether reduced axes are cut.

    Raises:
      _TooLittle: however small the pieces are, it does not fit. See `in_memory`.
    """
    sizes = [
        jaxpr.in_avals[k].shape[axis]
        for k, row in enumerate(asked)
        for axis, points in enumerate(row)
        if isinstance(points, Auto)
    ]
    if memory is None:
        return asked, partial
    model = Model(jaxpr, partial, measure, keeps)
    if not sizes:
        return asked, model.best(asked, memory)[1]

    def best(count: int) -> tuple[Peak, bool]:
        return model.best(_with_pieces(jaxpr, asked, count, chunks), memory)

    count = _fewest(lambda count: best(count)[0], max(sizes), memory)
    return _with_pieces(jaxpr, asked, count, chunks), best(count)[1]


def _fewest(held: Callable[[int], Peak], length: int, memory: int) -> int:
    """In how many pieces, at least, an axis fits; up to a sixteenth too many.

    Args:
      held: what is held in that many pieces.
      length: how long the axis is.
      memory: what may be held.

    Raises:
      _TooLittle: it does not fit in any number of pieces.
    """
    most = max(min(length, MOST_PIECES), 1)

    def fits(count: int) -> bool:
        return held(count).bytes <= memory

    count, too_few = 1, [0]
    while not fits(count) and count < most:
        too_few.append(count)
        count = min(2 * count, most)
        if too_few[-2]:
            guess = _predicted(held, length, memory, *too_few[-2:])
            count = min(max(count, guess), most)
    if not fits(count):
        # The places of very many pieces may take more than the pieces spare.
        doubled = (too_few[-1] << k for k in range(1, most.bit_length()))
        count = next((k for k in doubled if k < most and fits(k)), 0)
        if not count:
            raise _TooLittle(_at_most(memory, held(most), most))
    below, halves = too_few[-1], False
    while count - below > max(1, count // 16):
        middle = (below + count) // 2
        if below and not halves:
            middle = _predicted(held, length, memory, below, count)
        middle = min(max(middle, below + 1), count - 1)
        # Where the prediction only creeps up to it, halving is faster.
        halves = not fits(middle) and not halves
        below, count = (below, middle) if fits(middle) else (middle, count)
    return count


def _predicted(
    held: Callable[[int], Peak], length: int, memory: int, few: int, many: int
) -> int:
    """How many pieces fit if each index of a piece takes the same more."""
    longer, shorter = -(-length // few), -(-length // many)
    slope = (held(few).bytes - held(many).bytes) / max(longer - shorter, 1)
    fitting = shorter + (memory - held(many).bytes) / slope if slope > 0 else 0
    return -(-length // int(fitting)) if fitting >= 1 else length


def _with_pieces(
    jaxpr: ClosedJaxpr,
    asked: Asked,
    count: int,
    chunks: Chunks = lambda operand, axis: None,
) -> Asked:
    return tuple(
        tuple(
            cut_points(count, aval.shape[axis], chunks(k, axis))
            if isinstance(points, Auto)
            else points
            for axis, points in enumerate(row)
        )
        for k, (row, aval) in enumerate(zip(asked, jaxpr.in_avals, strict=True))
    )


def _too_little(memory: int, least: Peak, pieces: str, remedy: str) -> str:
    place = f" made at {least.source}" if least.source else ""
    value = f", of it {size(least.largest)} in {least.shape}{place}"
    held = size(least.bytes) + " at once" + (value if least.largest else "")
    return (
        f"memory={size(memory)} is too little: {pieces} the function still holds "
        f"{held}. Give as much, or {remedy}."
    )


def _at_most(memory: int, least: Peak, count: int) -> str:
    pieces = f"in {count:,} pieces" if count > 1 else "as a whole"
    return _too_little(memory, least, pieces, "cut other axes")


def asked_of(
    who: str,
    jaxpr: ClosedJaxpr,
    asked: Asked | None,
    partial: bool,
    memory: int | None,
    measure: Measure = loops_peak,
    keeps: bool = True,
) -> Asked:
    """The cuts that somebody asks for, and where nobody says, those that save the most.

    Args:
      who: what they are given to.
      jaxpr: what is cut.
      asked: the cuts, None if that is not said.
      partial: whether reduced axes may be cut.
      memory: the bytes that it may take.
      measure: what it takes.
      keeps: whether what could be computed again may be kept instead.

    Raises:
      ValueError: some are to be chosen, and it is not said what they are to fit in.
      _TooLittle: nothing fits. See `in_memory`.
    """
    if asked is None:
        if memory is not None:
            return chosen_axes(jaxpr, partial, memory, measure, keeps)
        return tuple(((),) * len(aval.shape) for aval in jaxpr.in_avals)
    has_auto = any(isinstance(n, Auto) for row in asked for n in row)
    if memory is None and has_auto:
        raise ValueError(f"{who}: a cut that is AUTO needs memory=, such as '2 GB'")
    if memory is not None and not has_auto:
        least, _ = Model(jaxpr, partial, measure, keeps).best(asked, memory)
        if least.bytes > memory:
            remedy = "cut into more pieces: AUTO is as many as it takes"
            pieces = "in the pieces that in_slices gives"
            raise _TooLittle(_too_little(memory, least, pieces, remedy))
    return asked


def chosen_axes(
    jaxpr: ClosedJaxpr,
    partial: bool,
    memory: int,
    measure: Measure,
    keeps: bool = True,
) -> Asked:
    """Which axes to cut so that a function fits: those that save the most.

    Raises:
      _TooLittle: it does not fit, whatever is cut. See `in_memory`.
    """
    model = Model(jaxpr, partial, measure, keeps)
    asked: Asked = tuple(((),) * len(aval.shape) for aval in jaxpr.in_avals)
    least, count = model.best(asked, memory)[0], 1

    def saving(each: Asked) -> int:
        return model.best(_with_pieces(jaxpr, each, TRIED))[0].bytes

    for _ in range(MOST_AXES):
        if least.bytes <= memory:
            return asked
        best = min(_candidates(jaxpr, asked), key=saving, default=None)
        if best is None or saving(best) >= least.bytes:
            break
        asked = best
        longest = max(
            aval.shape[axis]
            for aval, row in zip(jaxpr.in_avals, asked, strict=True)
            for axis, points in enumerate(row)
            if isinstance(points, Auto)
        )
        count = min(longest, MOST_PIECES)
        least = model.best(_with_pieces(jaxpr, asked, count), memory)[0]
    if least.bytes <= memory:
        return asked
    raise _TooLittle(_at_most(memory, least, count))


LEAVES_TRIED = 8
"""Of how many arguments, the largest ones, the axes are tried."""


def _candidates(jaxpr: ClosedJaxpr, asked: Asked) -> Iterator[Asked]:
    """``asked`` with one axis more."""
    sizes = [nbytes(var) for var in jaxpr.jaxpr.invars]
    largest = sorted(range(len(sizes)), key=lambda k: -sizes[k])[:LEAVES_TRIED]
    for k in sorted(largest):
        for axis, length in enumerate(jaxpr.in_avals[k].shape):
            if length > 1 and asked[k][axis] == ():
                row = (*asked[k][:axis], AUTO, *asked[k][axis + 1 :])
                yield (*asked[:k], row, *asked[k + 1 :])
