"""Indices that are known, and in order: each piece looks at a stretch of an axis."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.slices import Interval, Window
from shardmap.plan.lax.indexed.evaluated import evaluated
from shardmap.plan.lax.indexed.hulls import Hulls, stretch


@dataclass(frozen=True)
class OrderedPlaces(Window):
    """A window through which result ``i`` sees the ``i``-th of some ascending places.

    Attributes:
      content: the places, as bytes; from last to first where ``reverse`` is set.

    >>> ahead = OrderedPlaces.of(np.array([1, 1, 4, 9]), size=10)
    >>> ahead.reads((1, 3)), ahead.moves([2, 5], 4)
    (((1, 5), 0, 0), (2, 3))
    """

    content: bytes = b""

    @classmethod
    def of(
        cls, places: np.ndarray, size: int, reverse: bool = False
    ) -> "OrderedPlaces":
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
class Landings(OrderedPlaces):
    """A window through which a place sees the updates that go there.

    Attributes:
      size: how many updates there are.
      content: where they go, ascending, as `OrderedPlaces` has it.

    >>> ahead = Landings.of(np.array([1, 1, 4, 9]), size=4)
    >>> ahead.reads((1, 5)), ahead.reads((5, 9)), ahead.moves([2, 3], 10)
    (((0, 3), 0, 0), ((0, 0), 0, 0), (4, 9))
    """

    @classmethod
    def along(cls, places: OrderedPlaces) -> "Landings":
        """Where updates go that have these places."""
        count = len(places.places)
        return cls(count, reverse=places.reverse, content=places.content)

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


class Line(NamedTuple):
    """Known places of one axis, along an axis of the indices.

    Attributes:
      axis: the axis that they are places of.
      along: the axis of the indices.
      places: a row for each position along it, a column for each on other axes.
      varies: other axes of the indices along which they are not all the same.
    """

    axis: int
    along: int
    places: np.ndarray
    varies: tuple[int, ...]


def lines(
    node: Node, columns: tuple[int, ...], taken: Sequence[int] | None = None
) -> list[Line] | None:
    """Where a node's indices go, of those that are inside its first operand.

    Args:
      node: its second operand has the indices, one column per coordinate.
      columns: the axis of the first operand that each column is a place of.
      taken: how much of each axis is taken from a place on; None: one element.

    Returns:
      None if it is not known.
    """
    indices = evaluated(node.ins[1])
    if indices is None or indices.size == 0:
        return None
    found = []
    for k, axis in enumerate(columns):
        column, size = indices[..., k], node.in_shapes[0][axis]
        if column.min() < 0 or column.max() > size - (taken[axis] if taken else 1):
            continue
        varies = [n for n in range(column.ndim) if np.diff(column, axis=n).any()]
        for along in varies:
            places = np.moveaxis(column, along, 0).reshape(column.shape[along], -1)
            others = tuple(n for n in varies if n != along)
            found.append(Line(axis, along, places if others else places[:, :1], others))
    return found


def ordered(line: Line, size: int) -> OrderedPlaces | None:
    """What is looked at along an axis of this size, if that is in order."""
    if line.varies:
        return None
    places = line.places[:, 0]
    steps = np.diff(places)
    if (steps >= 0).all():
        return OrderedPlaces.of(places, size)
    if (steps <= 0).all():
        return OrderedPlaces.of(places[::-1], size, reverse=True)
    return None


def looked_at(line: Line, size: int, taken: int) -> OrderedPlaces | Hulls | None:
    """What a gather looks at along an axis of this size, if pieces look at pieces.

    Args:
      line: the places.
      size: the size of the axis.
      taken: how much of it is taken from each place on.
    """
    found = ordered(line, size) if taken == 1 else None
    if found is not None:
        return found
    hulls = Hulls.of(line.places.min(1), line.places.max(1) + taken - 1, size)
    return hulls if hulls.is_local() else None


def landing(line: Line, size: int) -> Landings | Hulls | None:
    """What a scatter puts along an axis of this size, if pieces get pieces."""
    found = ordered(line, size)
    if found is not None:
        return Landings.along(found)
    hulls = Hulls.landing(line.places, size)
    return hulls if hulls.is_local() else None
