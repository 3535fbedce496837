"""Indices that are known, and in order: each piece looks at a stretch of an axis."""

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

    def reads(self, result: Interval) -> tuple[Interval, int, int]:
        start, stop = result
        if stop == start:
            return (0, 0), 0, 0
        places = self.places
        if self.reverse:
            start, stop = len(places) - stop, len(places) - start
        steps = np.diff(places[:2])
        if (np.diff(places) == steps).all():
            # In words of where it starts, so that shards are alike.
            step, first = int(steps.sum()), int(places[0])
            return (first + start * step, first + (stop - 1) * step + 1), 0, 0
        return (int(places[int(start)]), int(places[int(stop) - 1]) + 1), 0, 0

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        found = np.searchsorted(self.places, np.asarray([*points]))
        found = size - found if self.reverse else found
        return tuple(n for n in np.unique(found).tolist() if 0 < n < size)


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
