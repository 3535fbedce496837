"""Rules of functions of the pieces of an axis.

The ``edges`` of an axis are the ends of its pieces. A function of each piece, see
`of_pieces`, gives an axis with one element per piece: element ``k`` sees the elements
from ``edges[k]`` to ``edges[k + 1]``. `in_pieces` goes back to the elements: each sees
its piece, and the result of that piece.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.rules import Axis, Factor, Windowed
from shardmap.planning.engine.slices import Edges, Interval, Window


@dataclass(frozen=True)
class _OfEdges(Window):
    """A window that knows where pieces lie.

    Attributes:
      edges: the ends of all pieces.
    """

    edges: tuple[int, ...] = ()

    @functools.cached_property
    def places(self) -> Edges:
        return Edges(self.edges)

    def ends(self, first: int, count: int) -> list[int]:
        """The ends of ``count`` pieces, from the piece ``first`` on."""
        return [self.places.at(first + k) for k in range(count + 1)]

    def numbers(self, interval: Interval) -> tuple[int, int]:
        """The first piece that an interval overlaps, and the number of such pieces."""
        start, stop = interval
        first = self.places.number(start)
        last = self.places.number(stop - 1) if stop > start else first
        return first, last - first + 1


def _lengths(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise(ends))


class PieceWindow(_OfEdges):
    """Each element of the result sees a piece.

    >>> PieceWindow.at((0, 4, 6, 9)).reads((1, 3))
    ((4, 9), (2, 3))
    """

    @classmethod
    def at(cls, edges: tuple[int, ...]) -> "PieceWindow":
        mean = -(-edges[-1] // (len(edges) - 1))
        return cls(edges[-1], stride=mean, extent=mean, edges=edges)

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        ends = self.ends(result[0], result[1] - result[0])
        return (ends[0], ends[-1]), _lengths(ends)

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        return tuple(range(1, size))


class Numbers(_OfEdges):
    """Each element of the result sees the result of its piece.

    >>> Numbers(3, edges=(0, 4, 6, 9)).reads((4, 7))
    ((1, 3), ())
    """

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        first, count = self.numbers(result)
        return (first, first + count), ()


@dataclass(frozen=True)
class WithinPiece(_OfEdges):
    """Each element of the result sees its piece: both axes are one loop.

    Attributes:
      start: whether an element sees those before it in its piece.
      stop: whether an element sees those after it in its piece.

    >>> WithinPiece(9, edges=(0, 4, 6, 9)).reads((5, 8))
    ((4, 9), (1, 2, 3))
    >>> WithinPiece(9, edges=(0, 4, 6, 9), stop=False).reads((5, 8))
    ((4, 8), (1, 2, 2))
    """

    start: bool = True
    stop: bool = True
    same_loop = True

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        first, count = self.numbers(result)
        ends = self.ends(first, count)
        if not self.start:
            ends[0] = result[0]
        if not self.stop:
            ends[-1] = result[1]
        return (ends[0], ends[-1]), (result[0] - ends[0], *_lengths(ends))


def of_pieces(
    node: Node,
    ins: Sequence[Sequence[Factor]],
    outs: Sequence[Sequence[Factor]],
    edges: Mapping[Any, tuple[int, ...]],
    function: Callable[..., Sequence[jax.Array]],
    **options: Any,
) -> Factors:
    """The rule of a function of each piece.

    Args:
      node: the equation.
      ins: the factors of operands.
      outs: the factors of results.
      edges: factor -> the ends of its pieces. In results, the factor counts the pieces.
      function: gets a piece of each operand, and its start by factor. Its results have
        length 1 along the factors in pieces.
      options: other attributes of `Factors`.
    """

    def emitter(local: Local) -> Sequence[jax.Array]:
        starts = {
            factor: jnp.asarray(edges[factor])[local.starts[factor]]
            for factor in local.starts
        }
        return of_box(local, local.values, list(edges), starts)

    def of_box(
        local: Local,
        values: Sequence[jax.Array],
        left: Sequence[Factor],
        starts: Mapping[Factor, jax.Array],
    ) -> Sequence[jax.Array]:
        """The results of a box, which has several pieces of the factors ``left``."""
        if not left:
            return function(*values, starts)
        factor, *rest = left
        axes = [list(row).index(factor) if factor in row else None for row in ins]
        places = [(k, axis) for k, axis in enumerate(axes) if axis is not None]
        lengths = local.holes[places[0]]
        if len(lengths) == 1:
            return of_box(local, values, rest, starts)
        columns, start = [], 0
        for length in lengths:
            piece = _taken(values, axes, start, length)
            starts_of_piece = {
                f: at + start * (f == factor) for f, at in starts.items()
            }
            columns.append(of_box(local, piece, rest, starts_of_piece))
            start += length
        return [
            lax.concatenate(parts, list(row).index(factor))
            for parts, row in zip(zip(*columns, strict=True), outs, strict=True)
        ]

    named = [
        [Windowed(f, PieceWindow.at(edges[f])) if f in edges else f for f in row]
        for row in ins
    ]
    return Factors(node, named, outs, emitter=emitter, cheap=False, **options)


def _taken(
    values: Sequence[jax.Array], axes: Sequence[int | None], start: int, length: int
) -> list[jax.Array]:
    """A part of each value along its axis; None for all of it."""
    return [
        value
        if axis is None or value.shape[axis] == length
        else lax.slice_in_dim(value, start, start + length, axis=axis)
        for value, axis in zip(values, axes, strict=True)
    ]


def in_pieces(
    node: Node,
    value: Sequence[Factor],
    numbers: Sequence[Factor],
    windows: Mapping[Any, WithinPiece],
    function: Callable[[jax.Array, jax.Array], jax.Array],
    **options: Any,
) -> Factors:
    """The rule of a function of each piece of a value, and of this piece's result.

    Args:
      node: the equation. Its operands are the value and the results of its pieces. Its
        result has the axes of the value.
      value: the factors of the value.
      numbers: the factors of the results of pieces.
      windows: factor in pieces -> the part of its piece that an element sees.
      function: makes a piece of the result.
      options: other attributes of `Factors`.
    """
    axes = {f: (list(value).index(f), list(numbers).index(f)) for f in windows}

    def emitter(local: Local) -> Sequence[jax.Array]:
        def of_box(
            box: jax.Array, results: jax.Array, left: Sequence[Factor]
        ) -> jax.Array:
            """The result of a box, which has several pieces of the factors ``left``."""
            if not left:
                return function(box, results)
            factor, *rest = left
            axis, place = axes[factor]
            offset, *lengths = local.holes[0, axis]
            parts, start = [], 0
            for number, length in enumerate(lengths):
                [piece] = _taken([box], [axis], start, length)
                [piece_of_result] = _taken([results], [place], number, 1)
                parts.append(of_box(piece, piece_of_result, rest))
                start += length
            joined = parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)
            size = local.sizes[factor]
            if size == joined.shape[axis]:
                return joined
            return lax.slice_in_dim(joined, offset, offset + size, axis=axis)

        whole, results = local.values
        return [of_box(whole, results, list(windows))]

    ins: list[list[Axis]] = [
        [Windowed(f, windows[f]) if f in windows else f for f in value],
        [
            Windowed(
                f, Numbers(len(piece_of_result.edges) - 1, edges=piece_of_result.edges)
            )
            if (piece_of_result := windows.get(f))
            else f
            for f in numbers
        ],
    ]
    return Factors(
        node,
        ins,
        [value],
        emitter=emitter,
        cheap=False,
        complete=frozenset({1}),
        **options,
    )
