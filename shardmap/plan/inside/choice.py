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


Chosen = TypeVar("Chosen")


def in_memory(choose: Callable[[bool], Chosen]) -> Chosen:
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


def cut_program(
    jaxpr: ClosedJaxpr, asked: Asked, partial: bool, keeps: bool = True
) -> CutProgram:
    """The program of a jaxpr, cut.

    Args:
      jaxpr: the program.
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
"""What a program that is cut takes."""


def loops_peak(made: CutProgram) -> Peak:
    """What it takes as loops in one program, besides its arguments and results."""
    structs = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in made.program.inputs]
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
        self._known: dict[Asked, tuple[Peak, bool]] = {}

    def __call__(self, asked: Asked) -> Peak:
        return self.best(asked)[0]

    def best(self, asked: Asked) -> tuple[Peak, bool]:
        """The least that these cuts take, and whether reduced axes are cut for that."""
        if asked not in self._known:
            self._known[asked] = min(
                ((self._peak(asked, partial), partial) for partial in self._choices),
                key=lambda each: each[0].bytes,
            )
        return self._known[asked]

    def _peak(self, asked: Asked, partial: bool) -> Peak:
        made = cut_program(self._jaxpr, asked, partial, self._keeps)
        return self._measure(made)


def resolved(
    jaxpr: ClosedJaxpr,
    asked: Asked,
    partial: bool,
    memory: int | None,
    measure: Measure = loops_peak,
    keeps: bool = True,
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
    if not sizes or memory is None:
        return asked, partial
    model = Model(jaxpr, partial, measure, keeps)

    def fits(count: int) -> bool:
        return model(_with_pieces(jaxpr, asked, count)).bytes <= memory

    most, count, too_few = min(max(sizes), MOST_PIECES), 1, 0
    while not fits(count):
        if count >= most:
            least = model(_with_pieces(jaxpr, asked, most))
            raise _TooLittle(_too_little(memory, least, most))
        too_few, count = count, min(2 * count, most)
    while count - too_few > max(1, count // 16):
        middle = (too_few + count) // 2
        too_few, count = (too_few, middle) if fits(middle) else (middle, count)
    found = _with_pieces(jaxpr, asked, count)
    return found, model.best(found)[1]


def _with_pieces(jaxpr: ClosedJaxpr, asked: Asked, count: int) -> Asked:
    return tuple(
        tuple(
            cut_points(count, aval.shape[axis]) if isinstance(points, Auto) else points
            for axis, points in enumerate(row)
        )
        for row, aval in zip(asked, jaxpr.in_avals, strict=True)
    )


def _too_little(memory: int, least: Peak, count: int) -> str:
    return (
        f"memory={size(memory)} is too little: in {count:,} pieces the function still "
        f"holds {size(least.bytes)} at once, of it "
        f"{size(least.largest)} in {least.shape} made at {least.source}. Give as much, "
        "or cut other axes."
    )


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
    if memory is None and any(isinstance(n, Auto) for row in asked for n in row):
        raise ValueError(f"{who}: a cut that is AUTO needs memory=, such as '2 GB'")
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
    least, count = model(asked), 1

    def saving(each: Asked) -> int:
        return model(_with_pieces(jaxpr, each, TRIED)).bytes

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
        least = model(_with_pieces(jaxpr, asked, count))
    if least.bytes <= memory:
        return asked
    raise _TooLittle(_too_little(memory, least, count))


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
