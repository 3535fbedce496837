"""Functions of the pieces of an axis.

The ``edges`` of an axis are the ends of its pieces. A function of each piece, see
`of_each_piece`, gives an axis with one element per piece: element ``k`` sees the
elements from ``edges[k]`` to ``edges[k + 1]``. Behind it, an element may see the result
of its piece (`Numbers`), and what else lies in its piece (`WithinPiece`).
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Graph, Operand, PlanPrimitive, Value
from shardmap.planning.engine.rules import MANY, Factor, Reason, RuleMaker, Windowed
from shardmap.planning.engine.slices import Edges, Interval, Window
from shardmap.planning.lax.staged.barrier import barrier

PIECES = PlanPrimitive("pieces")
"""A function of pieces. The parameter ``rule`` makes its rule."""

Points: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _OfEdges(Window):
    """A window that knows the ends of all pieces."""

    edges: Points = ()

    @functools.cached_property
    def places(self) -> Edges:
        return Edges(self.edges)

    def numbers(self, interval: Interval) -> tuple[int, int]:
        """The first piece that an interval overlaps, and the number of such pieces."""
        start, stop = interval
        first = self.places.number(start)
        last = self.places.number(stop - 1) if stop > start else first
        return first, last - first + 1


class PieceWindow(_OfEdges):
    """Each element of the result sees a piece.

    >>> PieceWindow(9, edges=(0, 4, 6, 9)).reads((1, 2))
    ((4, 6), ())
    """

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        # Behind a barrier, so each shard has one piece.
        assert result[1] - result[0] == 1, result
        return (self.places.at(result[0]), self.places.at(result[1])), ()

    def moves(self, points: Any, size: int) -> tuple[int, ...]:
        return tuple(range(1, size))


class Numbers(_OfEdges):
    """Each element of the result sees the result of its piece.

    >>> Numbers(3, edges=(0, 4, 6, 9)).reads((4, 7))
    ((1, 3), ())
    """

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        first, count = self.numbers(result)
        return (first, first + count), ()


class WithinPiece(_OfEdges):
    """Each element of the result sees its piece: both axes are one loop.

    >>> WithinPiece(9, edges=(0, 4, 6, 9)).reads((5, 8))
    ((4, 9), (1, 2, 3))
    """

    same_loop = True

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        """The elements, where the result starts in them, and the lengths of pieces."""
        first, count = self.numbers(result)
        ends = [self.places.at(first + k) for k in range(count + 1)]
        lengths = (b - a for a, b in itertools.pairwise(ends))
        return (ends[0], ends[-1]), (result[0] - ends[0], *lengths)


def of_each_piece(
    graph: Graph,
    function: Callable[..., Sequence[jax.Array]],
    operand: Operand,
    axes: Sequence[Factor],
    outs: Sequence[Sequence[Factor]],
    factor: Factor,
    edges: Points,
    wholes: Mapping[Factor, Reason] | None = None,
) -> list[Value]:
    """Adds a function of each piece to a graph, and a barrier after each result.

    Args:
      graph: the graph.
      function: gets a piece of the operand, and where it starts. Its results have
        length 1 along ``factor``, the axis in pieces, which counts them.
      operand, axes: the operand, and the factors of its axes.
      outs: the factors of the axes of results. Cuts of other axes pass.
      factor, edges: the axis in pieces, and their ends.
      wholes: the factors that are never cut.
    """
    whole = jax.ShapeDtypeStruct(operand.shape, operand.aval.dtype)
    avals = []
    for aval, row in zip(jax.eval_shape(function, whole, 0), outs, strict=True):
        shape = list(aval.shape)
        shape[list(row).index(factor)] = len(edges) - 1
        avals.append(jax.core.ShapedArray(tuple(shape), aval.dtype))

    def emitter(local: Local) -> Sequence[jax.Array]:
        start = jnp.asarray(edges)[local.starts[factor]]
        return function(*local.values, start)

    windows = [PieceWindow(edges[-1], edges=edges)]
    rule = _rule([axes], windows, outs, factor, wholes or {}, emitter, starts=[factor])
    stopped = {factor, *(wholes or {})}
    return [
        barrier(
            graph, result, passing=[k for k, f in enumerate(row) if f not in stopped]
        )
        for result, row in zip(
            graph.add(PIECES, {"rule": rule}, [operand], avals), outs, strict=True
        )
    ]


def within_pieces(
    graph: Graph,
    emitter: Callable[[Local], Sequence[jax.Array]],
    operands: tuple[Operand, Operand],
    axes: Sequence[Sequence[Factor]],
    factor: Factor,
    edges: Points,
    wholes: Mapping[Factor, Reason] | None = None,
) -> Value:
    """Adds a function of an operand and of what `of_each_piece` led to.

    Its result is like the operand. The other arguments are those of `of_each_piece`.
    """
    windows = [
        WithinPiece(edges[-1], edges=edges),
        Numbers(len(edges) - 1, edges=edges),
    ]
    rule = _rule(
        *(axes, windows, axes[:1], factor, wholes or {}, emitter),
        complete=frozenset({1}),
    )
    [result] = graph.add(PIECES, {"rule": rule}, operands, [operands[0].aval])
    return result


def _rule(
    axes: Sequence[Sequence[Factor]],
    windows: Sequence[Window],
    outs: Sequence[Sequence[Factor]],
    factor: Factor,
    wholes: Mapping[Factor, Reason],
    emitter: Callable[[Local], Sequence[jax.Array]],
    **options: Any,
) -> RuleMaker:
    """The maker of a rule in which each operand has a window along ``factor``."""
    ins = [
        [Windowed(f, window) if f == factor else f for f in row]
        for row, window in zip(axes, windows, strict=True)
    ]
    options |= {"wholes": wholes, "emitter": emitter, "cheap": False, "each": MANY}
    return functools.partial(Factors, ins=ins, outs=outs, **options)


def edges_of(points: Sequence[int], size: int, least: int) -> Points:
    """The ends of pieces that have at least ``least`` elements each."""
    edges = [0]
    for point in points:
        if point - edges[-1] >= least > 0 and size - point >= least:
            edges.append(point)
    return (*edges, size)


RULES: dict[Any, RuleMaker] = {PIECES: lambda node: node.params["rule"](node)}
