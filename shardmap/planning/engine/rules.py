"""The interface of rules, which say how the equations of a primitive may be cut.

A rule looks at one equation and answers three questions. Forward: which cuts of the
operands reach which axes of the results. Backward: which boxes of the operands a box of
the results depends on, exactly or as a hull. Emit: the equation for one shard.

The engine knows no primitive. It gets a table of rules. Equations of a primitive that
is not in the table are taken whole, with that as the reason.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax

from shardmap._jax.types import Primitive
from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Calls, Graph, Node, Operand
from shardmap.planning.engine.slices import Box, Interval, Window, refine

Factor: TypeAlias = Hashable
"""The name that a rule gives to a loop of its equation."""


class Windowed(NamedTuple):
    """An operand's axis that follows its factor through a window."""

    factor: Factor
    window: Window


Axis: TypeAlias = Factor | Windowed | None
"""A factor, directly or through a window; None for an axis of size 1."""

Origins: TypeAlias = frozenset[tuple[int, int]]
"""The (argument, axis) pairs that a cut comes from.

Values inside, at which cuts begin too, are numbered behind the arguments."""


class Cut(NamedTuple):
    """How an axis is cut.

    Attributes:
      at: the interior points.
      soft: whether they come through a window, a reshape or a concatenation. A hard
        cut of the same axis overrides them.
      origins: the cuts of arguments that these come from.
    """

    at: tuple[int, ...] = ()
    soft: bool = False
    origins: Origins = frozenset()


UNCUT = Cut()

MANY = 256
"""The operations per element of an equation whose cost is not known."""


def meet(cuts: Sequence[Cut]) -> Cut:
    """Combines cuts of an axis: the refinement of the hard ones, else the finest."""
    cuts = [cut for cut in cuts if cut.at]
    if len(cuts) < 2:
        return cuts[0] if cuts else UNCUT
    hard = [cut for cut in cuts if not cut.soft]
    origins = frozenset().union(*(cut.origins for cut in cuts))
    if hard:
        different = dict.fromkeys(cut.at for cut in hard)
        at = refine(different) if len(different) > 1 else hard[0].at
        return Cut(at, False, origins)
    # Refined, the shifted cuts of x[1:] and of x[:-1] would leave slivers of one row.
    return Cut(max(cuts, key=lambda cut: len(cut.at)).at, True, origins)


Stages: TypeAlias = Callable[
    [Graph, Node, Sequence[Sequence[Cut]]], Sequence[Operand] | None
]
"""Replaces a node at which cuts end by nodes that can be cut.

It gets the graph, the node and the cuts of its operands. It adds nodes and returns the
operands that replace the node's results, or returns None to keep the node."""


class Reason(NamedTuple):
    """Why a cut goes no further.

    Attributes:
      why: in words.
      remedy: what would make the axis cuttable.
      in_stages: whether the axis is cut nevertheless, each piece in its own stage.
    """

    why: str
    remedy: str = ""
    in_stages: bool = False

    def __str__(self) -> str:
        return self.why + (f" ({self.remedy})" if self.remedy else "")


class Lost(NamedTuple):
    """A cut that stops at an equation."""

    origins: Origins
    reason: Reason


class Contraction(NamedTuple):
    """A cut factor that an equation sums over, or reduces otherwise.

    Attributes:
      factor: the factor.
      size: the factor's size.
      operand: an operand that has the factor.
      axis: the axis of that operand.
      cut: how it is cut.
      combiners: the results that are partial, and how each combines.
    """

    factor: Factor
    size: int
    operand: int
    axis: int
    cut: Cut
    combiners: Mapping[int, Combiner]


class Forward(NamedTuple):
    """Where the cuts of the operands go.

    Attributes:
      outs: the cut of each axis of each result.
      contracted: the cut factors that make results partial.
      lost: the cuts that go nowhere.
    """

    outs: list[list[Cut]]
    contracted: Sequence[Contraction] = ()
    lost: Sequence[Lost] = ()


class Need(NamedTuple):
    """What a box of the results depends on.

    Attributes:
      boxes: per operand, None where it is not read.
      static: what the emitted equation depends on, except positions; hashable.
      starts: positions, which the emitted equation gets as traced scalars.
      computed: per result, the box that it computes; none: those that were asked for.
    """

    boxes: tuple[Box | None, ...]
    static: Any = ()
    starts: tuple[int, ...] = ()
    computed: Sequence[Box | None] = ()


Names: TypeAlias = Sequence[Sequence[Any]]
"""What a rule calls the loop of each axis of operands or results; None: it has none."""


class Rule(ABC):
    """What the engine asks of one equation."""

    node: Node

    cheap: bool = False
    """Whether computing it again is better than keeping it for a later stage."""

    runs_once: bool = False
    """Whether its results must be kept: the equations that take them run later."""

    each: int = MANY
    """About how many operations each element takes, to an order of magnitude."""

    complete: frozenset[int] = frozenset()
    """Operands that an earlier stage must compute."""

    shared_out: frozenset[int] = frozenset()
    """Operands divided among its shards or stages: none reads what another reads."""

    wholes: Mapping[Factor, Reason] = MappingProxyType({})
    """Factors that are never cut, and why, where a rule names its factors."""

    def operations(self) -> int:
        """About the operations of the whole equation; 0 where it is cheap."""
        shapes = (*self.node.in_shapes, *self.node.out_shapes)
        return 0 if self.cheap else sum(map(math.prod, shapes)) * self.each

    @abstractmethod
    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        """Where the cuts of the operands' axes go."""

    @abstractmethod
    def links(self) -> tuple[Names, Names]:
        """The loops of the operands and of the results, which run index by index."""

    def whole_axes(self, number: int) -> set[int]:
        """The axes of a result that the equation computes whole, as a sort does."""
        return set()

    @abstractmethod
    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        """What the boxes of the results depend on.

        Contracted factors in ``loops`` run over that interval only.
        """

    @abstractmethod
    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        """The computed boxes from the operands' boxes, as `backward` said."""

    def passes(self, combiner: str, pending: frozenset[int], /) -> str | None:
        """How the results combine if these operands are partial; None: they cannot."""
        return None

    def __str__(self) -> str:
        """The name of a rule that has no notation."""
        return f"({type(self).__name__.lower()})"


Passes: TypeAlias = Callable[[str, frozenset[int]], str | None]
"""The form of `Rule.passes`."""


def nothing_passes(combiner: str, pending: frozenset[int]) -> str | None:
    """The `Passes` of equations that need complete operands."""
    return None


def first_passes(combiner: str, pending: frozenset[int]) -> str | None:
    """The `Passes` of equations that only move elements of their first operand."""
    return combiner if pending == {0} else None


RuleMaker: TypeAlias = Callable[[Node], Rule]


@dataclass(eq=False)
class RuleTable(Calls):
    """What is known of primitives: besides `Calls`, the makers of their rules.

    Attributes:
      unknown: the maker for primitives that are not in ``makers``.
    """

    unknown: RuleMaker
    makers: MutableMapping[Primitive, RuleMaker] = field(default_factory=dict)

    def rule(self, node: Node) -> Rule:
        """The rule of an equation."""
        return self.makers.get(node.primitive, self.unknown)(node)
