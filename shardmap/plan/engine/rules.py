"""What a rule is, and the one kind of rule that covers most primitives: factors.

A rule looks at one equation and answers three questions. Forward: which cuts of the
operands reach which axes of the results. Backward: which boxes of the operands a box of
the results depends on, exactly or as a hull. Emit: the equation for one shard.

`Factors` answers all three from data. Each axis of each operand and result names a
factor, a loop that the equation runs over; what is said of a dot product

    i k, k j -> i j; k add

reads: a cut of ``i`` or ``j`` reaches the result, a cut of ``k`` gives partial results
that are to be added. ``*`` marks an axis that is needed whole, ``1`` one of size 1 that
is broadcast. An operand's axis may follow its factor through a `Window`.

The compiler knows no primitive. It gets a table, and treats what is not in the table as
whole, with that as the reason.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.slices import Box, Interval, Window, refine

Factor: TypeAlias = Hashable
Axis: TypeAlias = Any
"""A factor, None for an axis of size 1, or a pair of a factor and a `Window`."""


class Points(NamedTuple):
    """How an axis is cut.

    Attributes:
      at: the interior points.
      soft: whether they may be moved: they come from cuts of another index space, and
        give way where an axis has cuts of its own.
      origins: the (argument, axis) pairs whose cuts these are.
    """

    at: tuple[int, ...] = ()
    soft: bool = False
    origins: frozenset[tuple[int, int]] = frozenset()


UNCUT = Points()


def meet(cuts: Sequence[Points]) -> Points:
    """One cut from those that meet on an axis: the common refinement."""
    cuts = [cut for cut in cuts if cut.at]
    if len(cuts) < 2:
        return cuts[0] if cuts else UNCUT
    hard = [cut for cut in cuts if not cut.soft]
    origins = frozenset().union(*(cut.origins for cut in cuts))
    if hard:
        return Points(refine(cut.at for cut in hard), False, origins)
    return Points(max(cuts, key=lambda cut: len(cut.at)).at, True, origins)


class Reason(NamedTuple):
    """Why an axis is taken whole, and what would make it cuttable."""

    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return self.why + (f" ({self.remedy})" if self.remedy else "")


class Lost(NamedTuple):
    """A cut that ends at an equation."""

    origins: frozenset[tuple[int, int]]
    reason: Reason


class Forward(NamedTuple):
    """Where the cuts of the operands go.

    Attributes:
      outs: per result and axis.
      contracted: the factors that are summed over, with the cuts they have.
      lost: the cuts that go nowhere.
    """

    outs: list[list[Points]]
    contracted: dict[Factor, Points]
    lost: list[Lost]


class Need(NamedTuple):
    """What a box of the results depends on.

    Attributes:
      boxes: per operand, None where it is not read.
      static: what the emitted equation depends on, hashable; no positions.
      starts: positions, which the emitted equation gets as traced scalars.
    """

    boxes: tuple[Box | None, ...]
    static: Any = ()
    starts: tuple[int, ...] = ()


class Link(NamedTuple):
    """An axis of an operand or a result: `side` is "in" or "out"."""

    side: str
    number: int
    axis: int


class Rule(Protocol):
    """What the compiler asks of one equation."""

    cheap: bool
    """Whether computing it again is better than keeping it for a later stage."""
    complete: frozenset[int]
    """Operands that a stage before must have made."""

    def forward(self, cuts: Sequence[Sequence[Points]]) -> Forward: ...

    def links(self) -> list[list[Link]]:
        """The axes that are one and the same loop, index by index."""

    def windows(self) -> list[tuple[Link, Window, Link]]:
        """Axes of operands, and the axes of results that see them through a window."""

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        """What the boxes of the results depend on.

        Contracted factors in ``loops`` run over that interval only.
        """

    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[Any]
    ) -> Sequence[Any]:
        """The results' boxes from the operands' boxes, as `backward` said."""

    def passes(self, combiner: str, pending: frozenset[int]) -> str | None:
        """How the results combine if those operands are partial; None: not at all."""


def nothing_passes(combiner: str, pending: frozenset[int]) -> str | None:
    return None


def first_passes(combiner: str, pending: frozenset[int]) -> str | None:
    """For what only moves the elements of its first operand."""
    return combiner if pending == {0} else None


RuleMaker: TypeAlias = Callable[[Node], Rule]
