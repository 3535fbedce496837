"""A value in blocks that tasks make, and the parts of them that a box consists of."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from shardmap._jax.types import Value, has_explicit_sharding
from shardmap.arrays import array_likes
from shardmap.arrays.array_likes import device_put_array_like, handler_of
from shardmap.planning.engine.slices import Box, Interval, shape_of, slices

T = TypeVar("T")


class Blocks(Generic[T]):
    """The blocks of a value, by their boxes: where each is.

    >>> blocks = Blocks({((0, 4),): "a", ((4, 8),): "b", ((8, 10),): "c"}, 1)
    >>> list(blocks.overlapping(((2, 6),)))
    [('a', ((2, 4),), ((0, 2),)), ('b', ((0, 2),), ((2, 4),))]
    """

    def __init__(self, places: Mapping[Box, T], ndim: int) -> None:
        self.places = places
        # Boxes are products of intervals, which are looked up axis by axis.
        self._cuts: list[list[Interval]] = [
            sorted({box[axis] for box in places}) for axis in range(ndim)
        ]
        self._longest = [
            max((stop - start for start, stop in cuts), default=0)
            for cuts in self._cuts
        ]

    def overlapping(self, box: Box) -> Iterator[tuple[T, Box, Box]]:
        """Yields each block that a box overlaps: its place, and where they meet.

        The second is that part in the block, the third in the box.
        """
        near = [
            [
                (begin, end)
                for begin, end in self._near(axis, stop, start)
                if end > start
            ]
            for axis, (start, stop) in enumerate(box)
        ]
        for other in itertools.product(*near):
            if other in self.places:
                both = [
                    (max(first, begin), min(stop, end))
                    for (first, stop), (begin, end) in zip(box, other, strict=True)
                ]
                yield self.places[other], _inside(both, other), _inside(both, box)

    def _near(self, axis: int, stop: int, start: int) -> list[Interval]:
        cuts = self._cuts[axis]
        first = bisect.bisect_left(cuts, (start - self._longest[axis], 0))
        return cuts[first : bisect.bisect_left(cuts, (stop, 0))]


def put_together(
    shape: tuple[int, ...], dtype: Any, parts: Iterable[tuple[np.ndarray, Box]]
) -> np.ndarray:
    """An array of parts, each with its place."""
    array = None
    for part, here in parts:
        if np.shape(part) == shape:
            return np.asarray(part, dtype)
        if array is None:
            array = np.zeros(shape, dtype)
        array[slices(here)] = part
    return np.zeros(shape, dtype) if array is None else array


def _inside(part: list[Interval], box: Box) -> Box:
    """A part of a box, counted from the start of the box."""
    return tuple(
        (start - first, stop - first)
        for (start, stop), (first, _) in zip(part, box, strict=True)
    )


def sliceable(value: Value) -> Any:
    """The value, or if it has no slices, an array that has them.

    A handler makes it, or it is on several devices, and a slice of it would be a
    program on all of them.
    """
    if isinstance(value, jax.Array):
        is_whole = value.sharding.num_devices == 1
        if not value.is_fully_addressable or (
            is_whole and not has_explicit_sharding(jax.typeof(value))
        ):
            return value
        return Shards(value)
    if handler_of(type(value)) is None or hasattr(value, "__getitem__"):
        return value
    return device_put_array_like(value, SingleDeviceSharding(jax.local_devices()[0]))


class Shards:
    """An array on several devices, whose slices are read from those that hold them.

    Programs on several devices, as ``array[index]``, may hang in several threads.
    """

    def __init__(self, array: jax.Array) -> None:
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        self._array = array
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)
        held = array_likes.boxes(array.sharding, array.shape).values()
        shards = {box: array.addressable_data(k) for k, box in enumerate(held)}
        self._blocks = Blocks(shards, array.ndim)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rest = [slice(None)] * (len(self.shape) - len(index))
        wanted = array_likes.box((*index, *rest), self.shape)
        if wanted == tuple((0, size) for size in self.shape):
            return np.asarray(self._array)  # JAX keeps it.
        parts = (
            (_part(shard, slices(there)), here)
            for shard, there, here in self._blocks.overlapping(wanted)
        )
        return put_together(shape_of(wanted), self.dtype, parts)


def _part(shard: jax.Array, index: tuple[slice, ...]) -> np.ndarray:
    [device] = shard.devices()
    if device.platform == "cpu":
        return np.asarray(shard)[index]
    return np.asarray(shard[index])
