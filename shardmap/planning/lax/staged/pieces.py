"""Functions of the pieces of an axis.

The ``edges`` of an axis are the ends of its pieces. A function of each piece, see
`of_each_piece`, gives an axis with one element per piece: element ``k`` sees the
elements from ``edges[k]`` to ``edges[k + 1]``. Behind it, an element may see the result
of its piece (`Numbers`), and what else lies in its piece (`WithinPiece`).
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Graph, Node, Operand, PlanPrimitive, Value
from shardmap.planning.engine.rules import MANY, Reason, RuleMaker, Windowed
from shardmap.planning.engine.slices import Interval, Window
from shardmap.planning.lax.staged.barrier import barrier

PIECES = PlanPrimitive("pieces")
"""A function of pieces. The parameter ``rule`` makes its rule."""

CORE = Reason(
    "the operation works on the whole of this axis", "cut a batch axis instead"
)

Points: TypeAlias = tuple[int, ...]


class Edges:
    """Finds the piece of a place, and the start of a piece.

    Within a run of equally long pieces both are computed, not looked up, so they are
    linear functions there.

    >>> edges = Edges((0, 4, 8, 10))
    >>> edges.number(9), edges.at(2)
    (2, 8)
    """

    def __init__(self, edges: Sequence[int]) -> None:
        lengths = [stop - start for start, stop in itertools.pairwise(edges)]
        self._first = [
            k for k, n in enumerate(lengths) if k == 0 or n != lengths[k - 1]
        ]
        self._start = [edges[k] for k in self._first]
        self._length = [lengths[k] for k in self._first]

    def number(self, place: int) -> int:
        """The piece that a place lies in."""
        run = bisect.bisect_right(self._start, place) - 1
        return self._first[run] + (place - self._start[run]) // self._length[run]

    def at(self, number: int) -> int:
        """The start of a piece; for the number after the last one, the end."""
        run = bisect.bisect_right(self._first, number) - 1
        return self._start[run] + (number - self._first[run]) * self._length[run]


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
    axis: int,
    edges: Points,
    passing: Sequence[int] = (),
) -> list[Value]:
    """Adds a function of each piece to a graph, and a barrier after each result.

    Args:
      graph: the graph.
      function: gets a piece of the operand, and where it starts. Its results have
        length 1 along ``axis``, which counts the pieces.
      operand, axis, edges: the operand, the axis in pieces, and their ends.
      passing: the other axes, of the operand and of the results, that can be cut.
    """
    whole = jax.ShapeDtypeStruct(operand.shape, operand.aval.dtype)
    avals = [
        jax.core.ShapedArray(
            (*x.shape[:axis], len(edges) - 1, *x.shape[axis + 1 :]), x.dtype
        )
        for x in jax.eval_shape(function, whole, 0)
    ]

    def emitter(local: Local) -> Sequence[jax.Array]:
        return function(*local.values, jnp.asarray(edges)[local.starts[axis]])

    windows = [PieceWindow(edges[-1], edges=edges)]
    rule = functools.partial(
        _rule, axis, passing, windows, emitter=emitter, starts=[axis]
    )
    results = graph.add(PIECES, {"rule": rule}, [operand], avals)
    return [barrier(graph, result, passing=passing) for result in results]


def within_pieces(
    graph: Graph,
    emitter: Callable[[Local], Sequence[jax.Array]],
    operands: tuple[Operand, Operand],
    axis: int,
    edges: Points,
    passing: Sequence[int] = (),
) -> Value:
    """Adds a function of an operand and of what `of_each_piece` led to.

    Its result is like the operand. The other arguments are those of `of_each_piece`.
    """
    windows = WithinPiece(edges[-1], edges=edges), Numbers(len(edges) - 1, edges=edges)
    rule = functools.partial(
        _rule, axis, passing, windows, emitter=emitter, complete=frozenset({1})
    )
    [result] = graph.add(PIECES, {"rule": rule}, operands, [operands[0].aval])
    return result


def _rule(
    axis: int,
    passing: Sequence[int],
    windows: Sequence[Window],
    node: Node,
    **options: Any,
) -> Factors:
    """The rule of a node whose operands have a window along the axis in pieces."""
    passes = {*passing, axis}
    named: list[list[Any]] = [
        [k if k in passes else (number, k) for k in range(len(shape))]
        for number, shape in enumerate([*node.in_shapes, *node.out_shapes])
    ]
    wholes = {f: CORE for row in named for f in row if f not in passes}
    for row, window in zip(named, windows, strict=False):
        row[axis] = Windowed(axis, window)
    ins, outs = named[: len(windows)], named[len(windows) :]
    return Factors(node, ins, outs, wholes=wholes, cheap=False, each=MANY, **options)


def edges_of(points: Sequence[int], size: int, least: int) -> Points:
    """The ends of pieces that have at least ``least`` elements each."""
    edges = [0]
    for point in points:
        if point - edges[-1] >= least > 0 and size - point >= least:
            edges.append(point)
    return (*edges, size)


RULES: dict[Any, RuleMaker] = {PIECES: lambda node: node.params["rule"](node)}
