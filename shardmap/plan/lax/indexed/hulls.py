"""Indices that are known, and out of order, but such that pieces of them stay together.

A shift that wraps around, blocks in another order, the neighbours of each cell of a
mesh: a stretch of the result looks at a stretch of the axis, if not at its ends.
"""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardmap.plan.engine.slices import Interval, Window


@dataclass(frozen=True)
class Hulls(Window):
    """A window through which result ``i`` sees all from ``lows[i]`` to ``highs[i]``.

    Attributes:
      content: both, as bytes; nothing is seen where the low is above the high.

    >>> ahead = Hulls.of(np.array([2, 3, 0, 1]), np.array([2, 3, 0, 1]), size=4)
    >>> ahead.reads((0, 2)), ahead.reads((1, 3)), ahead.moves([2], 4)
    (((2, 4), 0, 0), ((0, 4), 0, 0), (2,))
    """

    content: bytes = b""

    @classmethod
    def of(cls, lows: np.ndarray, highs: np.ndarray, size: int) -> "Hulls":
        return cls(size, content=np.stack([lows, highs]).astype(np.int64).tobytes())

    @classmethod
    def landing(cls, places: np.ndarray, size: int) -> "Hulls":
        """How places see what goes there: the rows of ``places`` that name them.

        >>> Hulls.landing(np.array([[3], [0], [3]]), size=4).rows.tolist()
        [[1, 3, 3, 0], [1, -1, -1, 2]]
        """
        count = len(places)
        number = np.broadcast_to(np.arange(count)[:, None], places.shape)
        lows, highs = np.full(size, count), np.full(size, -1)
        np.minimum.at(lows, places, number)
        np.maximum.at(highs, places, number)
        return cls.of(lows, highs, count)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        return np.frombuffer(self.content, np.int64).reshape(2, -1)

    @functools.cached_property
    def step(self) -> int:
        """How far on each sees than the one before; 0 if it is not always as far."""
        steps = np.diff(self.rows)
        if not steps.size or (self.rows[0] > self.rows[1]).any():
            return 0
        return max(int(steps[0, 0]), 0) if (steps == steps[0, 0]).all() else 0

    def reads(self, result: Interval) -> tuple[Interval, int, int]:
        start, stop = result
        if stop == start:
            return (0, 0), 0, 0
        if self.step:
            # In words of where it starts, so that shards are alike.
            low, high = self.rows[:, 0].tolist()
            last = high + (stop - 1) * self.step
            return (low + start * self.step, last + 1), 0, 0
        lows, highs = self.rows[:, int(start) : int(stop)]
        seen = lows <= highs
        if not seen.any():
            return (0, 0), 0, 0
        low, high = int(lows[seen].min()), int(highs[seen].max()) + 1
        return (low, min(low + stretch(high - low), self.size)), 0, 0

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        """Where what is seen goes over into another piece, and not for a moment."""
        edges = np.unique(np.asarray([*points], np.int64))
        lows, highs = self.rows
        [seen] = np.nonzero(lows <= highs)
        if not len(seen):
            return ()
        piece = np.searchsorted(edges, (lows + highs)[seen] // 2, "right")
        starts = np.flatnonzero(np.diff(piece, prepend=piece[0] - 1))
        lengths = np.diff(starts, append=len(piece))
        long = starts[lengths * (len(edges) + 1) * MOMENTS >= len(piece)]
        changed = long[1:][np.diff(piece[long]) != 0]
        return tuple(n for n in seen[changed].tolist() if 0 < n < size)

    def is_local(self) -> bool:
        """Whether pieces of it see pieces, however many these are."""
        lows, highs = self.rows
        seen = lows <= highs
        if not seen.any():
            return False
        first, last = int(lows[seen].min()), int(highs[seen].max()) + 1
        for count in COUNTS:
            points = [first + (last - first) * k // count for k in range(1, count)]
            edges = [0, *self.moves(points, len(lows)), len(lows)]
            most = MOST_APART * -(-(last - first) // count)
            if len(edges) - 1 > MOST_APART * count or any(
                highs[a:b][seen[a:b]].max(initial=-1)
                - lows[a:b][seen[a:b]].min(initial=last)
                >= most
                for a, b in itertools.pairwise(edges)
            ):
                return False
        return True


MOMENTS = 8
"""What is shorter than this part of a piece makes no piece of its own."""

COUNTS = (4, 8)
"""In how many pieces it is tried whether they see pieces."""

MOST_APART = 2
"""How many times as many pieces there may be as asked for, and as long."""


def stretch(length: int) -> int:
    """A length that is at most a quarter longer, so that there are few of them.

    >>> [stretch(n) for n in (0, 7, 9, 10, 13, 1000)]
    [0, 7, 10, 10, 14, 1024]
    """
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step
