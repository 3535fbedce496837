"""Windows for known indices: a piece of the result reads a range of the axis.

Such indices are ordered, shifted around the end, blocks in another order, or the
neighbours of each cell of a mesh. Where they are equally far apart, the window is a
plain `Window`.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.slices import Interval, Window
from shardmap.planning.lax.indexed.known import known_columns


@dataclass(frozen=True)
class Ranges(Window):
    """A window in which each place of a result sees a range of the axis.

    Attributes:
      content: three rows of 64-bit integers as bytes: the places, ascending, and the
        first and the last element that each sees.

    >>> turned = np.array([2, 3, 0, 1])
    >>> ahead = Ranges.of(np.arange(4), turned, turned, size=4)
    >>> ahead.reads((0, 2)), ahead.reads((1, 3)), ahead.moves([2], 4)
    (((2, 4), ()), ((0, 4), ()), (2,))
    """

    content: bytes = b""

    @classmethod
    def of(
        cls, places: np.ndarray, lows: np.ndarray, highs: np.ndarray, size: int
    ) -> "Ranges":
        return cls(
            size, content=np.stack([places, lows, highs], dtype=np.int64).tobytes()
        )

    @functools.cached_property
    def rows(self) -> np.ndarray:
        return np.frombuffer(self.content, np.int64).reshape(3, -1)

    @functools.cached_property
    def is_ordered(self) -> bool:
        """Whether the ranges ascend or descend, and do not overlap."""
        _, lows, highs = self.rows
        ascends, descends = lows[1:] >= highs[:-1], highs[1:] <= lows[:-1]
        return bool(ascends.all() or descends.all())

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        places, lows, highs = self.rows
        first, last = np.searchsorted(places, [int(place) for place in result])
        if first >= last:
            return (0, 0), ()
        low, high = int(lows[first:last].min()), int(highs[first:last].max()) + 1
        return (low, min(low + stretch(high - low), self.size)), ()

    def _changes(self, points: Iterable[int]) -> np.ndarray:
        """The numbers of the places at which the piece that is seen changes."""
        edges = np.unique(np.asarray([*points], np.int64))
        _, lows, highs = self.rows
        piece = np.searchsorted(edges, (lows + highs) // 2, "right")
        starts = np.flatnonzero(np.diff(piece, prepend=-1))
        if not self.is_ordered:
            lengths = np.diff(starts, append=len(piece))
            starts = starts[lengths * (len(edges) + 1) * SHORT >= len(piece)]
        return starts[1:][np.diff(piece[starts]) != 0]

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        edges = [0]
        for place in self.rows[0][self._changes(points)].tolist():
            # A piece that was rounded up may hold the next one as well.
            ahead = max(place - edges[-1], 0)
            # Rounded up, so that pieces have few different lengths.
            edges.append(edges[-1] + (stretch(ahead) if self.is_ordered else ahead))
        return tuple(dict.fromkeys(n for n in edges if 0 < n < size))

    def is_local(self) -> bool:
        """Whether a piece of the result sees little more than a piece of the axis."""
        if self.is_ordered:
            return True
        _, lows, highs = self.rows
        first, last = int(lows.min()), int(highs.max()) + 1
        for count in COUNTS:
            points = [first + (last - first) * k // count for k in range(1, count)]
            edges = [0, *self._changes(points), len(lows)]
            most = MOST_APART * -(-(last - first) // count)
            if len(edges) - 1 > MOST_APART * count or any(
                highs[a:b].max() - lows[a:b].min() >= most
                for a, b in itertools.pairwise(edges)
            ):
                return False
        return True


SHORT = 8
"""Runs shorter than a piece divided by this number make no piece of their own."""

COUNTS = (4, 8)
"""The numbers of pieces for which `Ranges.is_local` is tested."""

MOST_APART = 2
"""How many times more pieces there may be than asked for, and how much longer."""


class SpreadPlaces(Window):
    """A dilated window without padding in its holes."""

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        return super().reads(result)[0], ()


def stretch(length: int) -> int:
    """Rounds a length up, by at most a quarter, so that few lengths differ.

    >>> [stretch(n) for n in (0, 7, 9, 10, 13, 1000)]
    [0, 7, 10, 10, 14, 1024]
    """
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


class Line(NamedTuple):
    """Known places on one axis, that change along an axis of the indices.

    Attributes:
      axis: the axis of the operand.
      along: the axis of the indices.
      places: one row per position along it, one column per position on other axes.
      varies: the other axes of the indices along which they change.
    """

    axis: int
    along: int
    places: np.ndarray
    varies: tuple[int, ...]


def lines(
    node: Node, columns: tuple[int, ...], taken: Sequence[int] | None = None
) -> list[Line] | None:
    """The known indices of a node that lie inside of its first operand.

    Each column of its second operand indexes one of the axes, of which a window of some
    length is taken. None if nothing is known.
    """
    known = known_columns(node.ins[1])
    if all(column is None or not column.size for column in known):
        return None
    known_lines = []
    for axis, column in zip(columns, known, strict=True):
        room = node.in_shapes[0][axis] - (taken[axis] if taken else 1)
        if column is None or column.min() < 0 or column.max() > room:
            continue
        varies = [n for n in range(column.ndim) if np.diff(column, axis=n).any()]
        for along in varies:
            places = np.moveaxis(column, along, 0).reshape(column.shape[along], -1)
            others = tuple(n for n in varies if n != along)
            known_lines.append(
                Line(axis, along, places if others else places[:, :1], others)
            )
    return known_lines


def gather_window(line: Line, size: int, taken: int) -> Window | None:
    """The window of a gather on an axis; None if pieces would read all over it."""
    lows, highs = line.places.min(1), line.places.max(1) + taken - 1
    step = _step(lows)
    if step and step == _step(highs):
        extent = int(highs[0] - lows[0]) + 1
        return Window(size, stride=step, pad=-int(lows[0]), extent=extent)
    return _local(np.arange(len(lows)), lows, highs, size)


def scatter_window(line: Line, size: int) -> Window | None:
    """The window through which places see their updates; None if these are all over."""
    count = len(line.places)
    step = 0 if line.varies else _step(line.places[:, 0])
    if step:
        return SpreadPlaces(count, pad=int(line.places[0, 0]), dilation=step)
    places, group = np.unique(line.places, return_inverse=True)
    number = np.broadcast_to(np.arange(count)[:, None], line.places.shape)
    lows, highs = np.full(len(places), count), np.full(len(places), -1)
    np.minimum.at(lows, group.reshape(-1), number.reshape(-1))
    np.maximum.at(highs, group.reshape(-1), number.reshape(-1))
    return _local(places, lows, highs, count)


def _step(places: np.ndarray) -> int:
    """The distance of ascending places; 0 if it is not the same for all."""
    steps = np.diff(places)
    is_even = len(steps) and (steps == steps[0]).all()
    return max(int(steps[0]), 0) if is_even else 0


def _local(
    places: np.ndarray, lows: np.ndarray, highs: np.ndarray, size: int
) -> Ranges | None:
    ranges = Ranges.of(places, lows, highs, size)
    return ranges if ranges.is_local() else None
