"""Indices that are known, and in order: each piece looks at a stretch of an axis."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.slices import Interval, Window
from shardmap.plan.lax.indexed.evaluated import evaluated


@dataclass(frozen=True)
class Places(Window):
    """A window through which result ``i`` sees the ``i``-th of some ascending places.

    Attributes:
      content: the places, as bytes; from last to first where ``reverse`` is set.

    >>> ahead = Places.of(np.array([1, 1, 4, 9]), size=10)
    >>> ahead.reads((1, 3)), ahead.moves([2, 5], 4)
    (((1, 5), 0, 0), (2, 3))
    """

    content: bytes = b""

    @classmethod
    def of(cls, places: np.ndarray, size: int, reverse: bool = False) -> "Places":
        return cls(size, reverse=reverse, content=places.astype(np.int64).tobytes())

    @property
    def places(self) -> np.ndarray:
        return np.frombuffer(self.content, np.int64)

    @functools.cached_property
    def step(self) -> int:
        """How far apart they are; 0 if some are farther than others."""
        steps = np.diff(self.places)
        return int(steps[0]) if len(steps) and (steps == steps[0]).all() else 0

    def reads(self, result: Interval) -> tuple[Interval, int, int]:
        start, stop = result
        if stop == start:
            return (0, 0), 0, 0
        places = self.places
        if self.reverse:
            start, stop = len(places) - stop, len(places) - start
        step, first = self.step, int(places[0])
        if step or len(places) == 1:
            # In words of where it starts, so that shards are alike.
            return (first + start * step, first + (stop - 1) * step + 1), 0, 0
        first, last = int(places[int(start)]), int(places[int(stop) - 1])
        return (first, min(first + stretch(last + 1 - first), self.size)), 0, 0

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        found = np.searchsorted(self.places, np.asarray([*points]))
        found = size - found if self.reverse else found
        return self._cuts(found, size)

    def _cuts(self, points: np.ndarray, size: int) -> tuple[int, ...]:
        """Cuts at these points, or behind them so that few pieces differ in length."""
        found = [0]
        for point in np.unique(points).tolist():
            ahead = point - found[-1]
            if ahead > 0:
                found.append(found[-1] + (ahead if self.step else stretch(ahead)))
        return tuple(n for n in found[1:] if n < size)


@dataclass(frozen=True)
class Landings(Places):
    """A window through which a place sees the updates that go there.

    Attributes:
      size: how many updates there are.
      content: where they go, ascending, as `Places` has it.

    >>> ahead = Landings.of(np.array([1, 1, 4, 9]), size=4)
    >>> ahead.reads((1, 5)), ahead.reads((5, 9)), ahead.moves([2, 3], 10)
    (((0, 3), 0, 0), ((0, 0), 0, 0), (4, 9))
    """

    @classmethod
    def along(cls, places: Places) -> "Landings":
        """Where updates go that have these places."""
        count = len(places.places)
        return cls(count, reverse=places.reverse, content=places.content)

    @property
    def most_together(self) -> int:
        """How many go to the place to which most do."""
        _, counts = np.unique(self.places, return_counts=True)
        return int(np.max(counts))

    def reads(self, result: Interval) -> tuple[Interval, int, int]:
        places, count = self.places, self.size
        step, first = self.step, int(places[0])
        if step:
            # In words of where it starts, so that shards are alike.
            low, high = (
                min(max(-((first - place) // step), 0), count) for place in result
            )
        else:
            found = np.searchsorted(places, [int(place) for place in result])
            low, high = found.tolist()
            # Those that go elsewhere are dropped.
            high = min(low + stretch(high - low), count)
        if low >= high:
            return (0, 0), 0, 0
        return ((count - high, count - low) if self.reverse else (low, high)), 0, 0

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        found = np.asarray([*points])
        if self.reverse:
            # The one before is the last that goes to the upper side.
            found = self.size - found
        return self._cuts(self.places[found], size)


def stretch(length: int) -> int:
    """A length that is at most a quarter longer, so that there are few of them.

    >>> [stretch(n) for n in (0, 7, 9, 10, 13, 1000)]
    [0, 7, 10, 10, 14, 1024]
    """
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


def ordered(node: Node, columns: tuple[int, ...]) -> dict[int, tuple[int, Places]]:
    """The axes of a node's first operand that its indices go along in order.

    Args:
      node: its second operand has the indices, one column per coordinate.
      columns: the axis of the first operand that each column is a place of.

    Returns:
      Axis of the first operand -> axis of the indices, and what it looks at.
    """
    indices = evaluated(node.ins[1])
    if indices is None or indices.size == 0:
        return {}
    found = {}
    for k, axis in enumerate(columns):
        column, size = indices[..., k], node.in_shapes[0][axis]
        if column.min() < 0 or column.max() >= size:
            continue
        for along in range(column.ndim):
            line = np.moveaxis(column, along, 0)
            first = line.reshape(len(line), -1)[:, 0]
            steps = np.diff(first)
            constant = (line == first.reshape([-1] + [1] * (column.ndim - 1))).all()
            if not constant or not steps.any():
                continue
            if (steps >= 0).all():
                found[axis] = along, Places.of(first, size)
            elif (steps <= 0).all():
                found[axis] = along, Places.of(first[::-1], size, reverse=True)
    return found
