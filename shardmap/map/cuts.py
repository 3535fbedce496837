"""How arrays are cut on the devices that hold them, found out once for each layout."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from shardmap.map.array_likes import boxes
from shardmap.map.on_device import Operand, operand, program


class Placed(NamedTuple):
    """What a leaf is, and where: all that the cuts depend on."""

    operand: Operand
    sharding: Sharding | None
    """None for what is on no device: a tracer, or an array on the host."""


def placed(leaf: Any) -> Placed:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return Placed(operand(leaf), leaf.sharding)
    return Placed(Operand(np.shape(leaf), None), None)


class Step(NamedTuple):
    """What one device does."""

    run: Callable[..., list[jax.Array]]
    shards: Sequence[tuple[int, int]]
    """Leaf, and number of its shard."""
    offsets: Sequence[np.int32]
    targets: Sequence[tuple[int, int]]
    """Leaf, and position in its list of pieces."""


class Cuts(NamedTuple):
    lengths: Sequence[int]
    """How many pieces each leaf gives."""
    steps: Sequence[Step]
    indexed: Sequence[tuple[int, tuple[slice, ...]]]
    """Leaf that is on no device, and what stands before the element in its index."""


class RefusedError(Exception):
    """An error about one leaf, whose name only the caller knows."""

    def __init__(self, leaf: int, error: Exception) -> None:
        super().__init__(str(error))
        self.leaf, self.kind = leaf, type(error)


@functools.lru_cache(maxsize=4096)
def cuts_for(leaves: tuple[Placed, ...], axis: int, index: int | None) -> Cuts:
    """How to take the element at ``index``, or all for None, of each leaf.

    Raises:
      RefusedError: what is wrong with which leaf.
    """
    lengths, indexed = [], []
    # What is cut alike from the same device is cut by one program.
    work: dict[tuple[jax.Device, bool], list[_Part]] = {}
    for number, (kind, sharding) in enumerate(leaves):
        try:
            dimension, element = _normalized(kind.shape, axis, index)
            lengths.append(kind.shape[dimension] if element is None else 1)
            if sharding is None:
                indexed.append((number, (slice(None),) * dimension))
                continue
            for part in _parts(number, kind, sharding, dimension, element):
                work.setdefault((part.device, part.every), []).append(part)
        except (IndexError, ValueError) as error:
            raise RefusedError(number, error) from None
    steps = []
    for (device, every), parts in work.items():
        operands = [part.operand for part in parts]
        offsets = [] if every else [np.int32(part.offset) for part in parts]
        cut = _Cut(tuple(part.axis for part in parts), every)
        steps.append(
            Step(
                program(device, cut, (*operands, *map(operand, offsets))),
                [(part.leaf, part.shard) for part in parts],
                offsets,
                [(part.leaf, k) for part in parts for k in part.positions],
            )
        )
    return Cuts(lengths, steps, indexed)


class _Part(NamedTuple):
    """What is wanted of one shard of a leaf."""

    leaf: int
    shard: int
    device: jax.Device
    operand: Operand
    axis: int
    every: bool
    """All elements are wanted, not the one at ``offset``."""
    offset: int
    positions: Sequence[int]
    """Where the results go."""


def _parts(
    leaf: int, kind: Operand, sharding: Sharding, axis: int, element: int | None
) -> Iterator[_Part]:
    size, holders = _blocks(sharding, kind.shape, axis)
    if element is None:
        wanted = range(kind.shape[axis] // size)
    else:
        wanted = range(element // size, element // size + 1)
    shape = (*kind.shape[:axis], size, *kind.shape[axis + 1 :])
    for block in wanted:
        start = block * size
        if block not in holders:
            raise ValueError(
                f"has its elements {start} to {start + size - 1} along axis {axis} on "
                "a device of another process"
            )
        # A block of one element is wanted whole, which is cheaper.
        every = element is None or size == 1
        positions = range(start, start + size) if element is None else range(1)
        yield _Part(
            leaf,
            *holders[block],
            operand=kind._replace(shape=shape),
            axis=axis,
            every=every,
            offset=0 if element is None else element % size,
            positions=positions,
        )


class _Blocks(NamedTuple):
    """Who holds the elements along an axis."""

    size: int
    """How many elements are together."""
    holders: dict[int, tuple[int, jax.Device]]
    """Number of a block -> a shard of it on this process, by number, and its device."""


def _blocks(sharding: Sharding, shape: tuple[int, ...], axis: int) -> _Blocks:
    size = 1
    holders: dict[int, tuple[int, jax.Device]] = {}
    for number, (device, bounds) in enumerate(boxes(sharding, shape).items()):
        for dimension, (start, stop) in enumerate(bounds):
            if dimension != axis and stop - start != shape[dimension]:
                raise ValueError(
                    f"of shape {shape} is cut along axis {dimension} into pieces of "
                    f"{stop - start}, so that several devices hold an element of axis "
                    f"{axis}: index it as x[i], or lay it out with jax.device_put and "
                    f"shardmap.pmap_sharding first"
                )
        start, stop = bounds[axis]
        size = max(stop - start, 1)
        holders.setdefault(start // size, (number, device))
    return _Blocks(size, holders)


def _normalized(
    shape: tuple[int, ...], axis: int, index: int | None
) -> tuple[int, int | None]:
    """The axis and the index counted from the front."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"of shape {shape} has no axis {axis}")
    size = shape[axis]
    if index is not None and not -size <= index < size:
        raise IndexError(
            f"of shape {shape} has size {size} along axis {axis}: index {index} is out "
            "of range"
        )
    return axis % len(shape), None if index is None else index % size


@dataclass(frozen=True)
class _Cut:
    """A program that cuts shards: one array for each of ``axes``, then the offsets."""

    axes: tuple[int, ...]
    every: bool
    """Give all elements of each array instead of the one at its offset."""

    def __call__(self, *args: Any) -> list[Any]:
        shards, offsets = args[: len(self.axes)], args[len(self.axes) :]
        if self.every:
            return [
                jax.lax.index_in_dim(shard, k, axis, keepdims=False)
                for shard, axis in zip(shards, self.axes, strict=True)
                for k in range(shard.shape[axis])
            ]
        return [
            jax.lax.dynamic_index_in_dim(shard, offset, axis, keepdims=False)
            for shard, offset, axis in zip(shards, offsets, self.axes, strict=True)
        ]
