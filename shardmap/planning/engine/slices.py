"""The slice algebra of the engine.

An interval is a pair ``(start, stop)`` of ints, and a box is a tuple of intervals, one
per axis. The cut of an axis is given by its interior points, where one piece ends and
the next begins: an axis of size 10 in pieces of 4, 4 and 2 has the points ``(4, 8)``.
The common refinement of two cuts is the union of their points.

>>> pieces((4, 8), 10)
[(0, 4), (4, 8), (8, 10)]
"""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from shardmap.planning.engine.affine import is_known

Interval: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Interval, ...]


def pieces(points: Sequence[int], size: int) -> list[Interval]:
    """The intervals into which the points cut an axis."""
    edges = [0, *points, size]
    return list(itertools.pairwise(edges))


def refine(cuts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The common refinement.

    >>> refine([(4, 8), (5,)])
    (4, 5, 8)
    """
    return tuple(sorted({point for cut in cuts for point in cut}))


def whole(shape: Iterable[int]) -> Box:
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def hull(a: Box, b: Box) -> Box:
    """The smallest box that holds both."""
    return tuple(join(x, y) for x, y in zip(a, b, strict=True))


def join(a: Interval, b: Interval) -> Interval:
    # An empty interval lies nowhere: its ends would only make the other one longer.
    if a[0] == a[1]:
        return b
    if b[0] == b[1]:
        return a
    return min(a[0], b[0]), max(a[1], b[1])


def hull_of(boxes: Iterable[Box | None]) -> Box | None:
    """The hull of those that are not None."""
    covering: Box | None = None
    for box in boxes:
        if box is not None:
            covering = box if covering is None else hull(covering, box)
    return covering


def contains(outer: Box, inner: Box) -> bool:
    """Returns True if ``inner`` lies in ``outer``; an empty interval always does."""
    return all(
        (a <= c and d <= b) or c == d
        for (a, b), (c, d) in zip(outer, inner, strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of an array."""
    return tuple(slice(start, stop) for start, stop in box)


def merge(boxes: Collection[Box], limit: int, parts: bool = False) -> list[Box]:
    """Boxes that contain all of these; if there were more than ``limit``, one.

    Two boxes become their hull if it has no more elements than both together. With
    symbolic positions, boxes whose distance differs between shards stay apart: where
    one lies in their hull is static, so each shard would compile. With ``parts``, so do
    parts of a box that is eight times as large, as they take little to compute.

    >>> merge([((0, 4),), ((1, 5),), ((90, 95),)], 4)
    [((0, 5),), ((90, 95),)]
    """
    if len(boxes) == 1:
        return list(boxes)
    merged: list[Box] = []
    for box in boxes:
        place = len(merged)
        while (at := _mergeable(merged, box, parts)) is not None:
            box, place = hull(merged.pop(at), box), at
        merged.insert(place, box)
        if len(merged) > limit:
            return [one for one in (hull_of(boxes),) if one is not None]
    return merged


def _mergeable(boxes: Sequence[Box], box: Box, parts: bool) -> int | None:
    """The number of the first box whose hull with another costs nothing."""
    for number, other in enumerate(boxes):
        if other == box:
            return number
    for number, other in enumerate(boxes):
        pairs = zip(other, box, strict=True)
        if not all(is_known(a[0] - b[0]) for a, b in pairs):
            continue
        both = hull(other, box)
        small, large = sorted((volume(other), volume(box)))
        if parts and 8 * small <= large and both in (other, box):
            continue
        # Sizes that depend on the shard may be equal in this shard only.
        by_chance = not all(map(is_known, shape_of(both)))
        if volume(both) + by_chance <= small + large:
            return number
    return None


@dataclass(frozen=True)
class Window:
    """Which elements of an input axis one element of the result depends on.

    The input is dilated (its elements are ``dilation`` apart), ``pad`` holes precede
    it, and result ``i`` reads the ``extent`` positions from ``i * stride`` on. Slices,
    padding, convolutions and poolings all have this form.

    >>> Window(size=10, stride=2, pad=1, extent=3).reads((0, 2))
    ((0, 4), (1, 0))
    """

    same_loop: ClassVar[bool] = False
    """Whether both axes are one loop, so that cuts pass as they are."""

    size: int
    stride: int = 1
    pad: int = 0
    extent: int = 1
    dilation: int = 1
    reverse: bool = False

    def __post_init__(self) -> None:
        # Shapes may hold NumPy integers, which wrap around.
        for name in ("size", "stride", "pad", "extent", "dilation"):
            object.__setattr__(self, name, int(getattr(self, name)))

    def reads(self, result: Interval) -> tuple[Interval, tuple[int, ...]]:
        """The elements that an interval of the result reads, and the holes around.

        Returns:
          The interval of the input, and the numbers of holes before and after it. The
          interval is empty if there are only holes.
        """
        start, stop = result
        if self.reverse:
            return (self.size - stop, self.size - start), (0, 0)
        if stop == start:
            return (0, 0), (0, 0)
        first = start * self.stride - self.pad
        count = (stop - 1 - start) * self.stride + self.extent
        low = min(max(-(-first // self.dilation), 0), self.size)
        high = max(min((first + count - 1) // self.dilation + 1, self.size), low)
        if low == high:
            return (0, 0), (count, 0)
        before = low * self.dilation - first
        inside = (high - low - 1) * self.dilation + 1
        return (low, high), (before, count - before - inside)

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        """The points of a result of this size that match points of the input."""
        if self.reverse:
            return tuple(sorted(self.size - point for point in points))
        # The result whose window is centred on the point: both pieces read half a halo.
        middle = (self.extent - 1) // 2
        matching = {
            -(-(point * self.dilation + self.pad - middle) // self.stride)
            for point in points
        }
        return tuple(sorted(point for point in matching if 0 < point < size))
