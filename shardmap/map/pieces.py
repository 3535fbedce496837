"""Taking arrays apart: the pieces along an axis, each from the device that holds it.

``y[i]`` on an array that lies on several devices is a program over all of them, and so
is its result. The functions here read the one device that holds element ``i``.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from shardmap.map.array_likes import boxes
from shardmap.map.on_device import run_on


def shard_of(x: Any, i: int, *, axis: int = 0) -> Any:
    """Element ``i`` along an axis, on the device that holds it and on no other.

    The value of ``x[i]``, without communication and without the other devices. Of a
    pytree, element ``i`` of each leaf.

    The result is not committed: it may meet arrays on any device, and `jax.jit` then
    runs where those are, or on the default device. ``jax.device_put(piece,
    piece.device)`` commits it, so that what is computed from it stays there.

    Args:
      x: an array, or a pytree of arrays, that are not cut but along ``axis``, each
        piece as long as you like. NumPy arrays are indexed. So are tracers: inside
        `jax.jit`, `jax.grad` and so on this is ``x[i]``.
      i: the element, negative from the end.
      axis: the axis, which the result has not, negative from the end.

    Raises:
      ValueError: an array is cut along another axis too, so that the element is on
        several devices; the device is of another process; there is no such axis.
      IndexError: ``i`` is out of range.

    Example:
      >>> y = jax.device_put(np.arange(6).reshape(2, 3), jax.devices()[0])
      >>> shard_of(y, 1)
      Array([3, 4, 5], dtype=int32)
    """
    number = operator.index(i)
    leaves, tree = jax.tree.flatten(x)
    taken = _take("shard_of", x, leaves, axis, number)
    return jax.tree.unflatten(tree, [pieces[0] for pieces in taken])


def unstack(x: Any, *, axis: int = 0) -> list[Any]:
    """All elements along an axis, each on the device that holds it.

    ``[shard_of(x, 0), shard_of(x, 1), ...]``, with one program for each device.

    Args:
      x: as for `shard_of`. The leaves of a pytree are equally long along ``axis``.
      axis: the axis, which the results have not, negative from the end.

    Returns:
      A list of arrays, or of pytrees like ``x``.

    Raises:
      ValueError: as for `shard_of`; or leaves differ in length, or there are none.

    Example:
      >>> unstack({"a": np.arange(2), "b": np.zeros((2, 3))})[1]["a"]
      np.int64(1)
    """
    leaves, tree = jax.tree.flatten(x)
    taken = _take("unstack", x, leaves, axis, None)
    lengths = [len(pieces) for pieces in taken]
    if len(set(lengths)) != 1:
        listed = "".join(
            f"\n  * {_name(x, k)} has {length}" for k, length in enumerate(lengths)
        )
        raise ValueError(
            "unstack needs arrays with equally many elements along axis "
            f"{axis}:{listed or ' there are no arrays'}"
        )
    return [jax.tree.unflatten(tree, elements) for elements in zip(*taken, strict=True)]


def unreplicate(tree: Any, *, axis: int = 0) -> Any:
    """Element 0 of each array: what all elements are, where they are equal.

    As `flax.jax_utils.unreplicate`. It is ``shard_of(tree, 0)``.

    Args:
      tree: as for `shard_of`.
      axis: the mapped axis, which the results have not.

    Raises:
      ValueError: as `shard_of`.
      IndexError: there is no element.

    Example:
      >>> unreplicate({"w": np.ones((8, 2))})
      {'w': array([1., 1.])}
    """
    leaves, structure = jax.tree.flatten(tree)
    taken = _take("unreplicate", tree, leaves, axis, 0)
    return jax.tree.unflatten(structure, [pieces[0] for pieces in taken])


class _Blocks(NamedTuple):
    """Who holds the elements along an axis."""

    size: int
    """How many elements are together."""
    holders: dict[int, tuple[int, jax.Device]]
    """Number of a block -> a shard of it on this process, by number, and its device."""


@functools.lru_cache(maxsize=4096)
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


class _Part(NamedTuple):
    """What is wanted of one shard."""

    device: jax.Device
    shard: jax.Array
    axis: int
    every: bool
    """All elements are wanted, not the one at ``offset``."""
    offset: int
    first: int
    """Where the result, or the first of the results, goes in the leaf's list."""


def _take(
    caller: str, tree: Any, leaves: Sequence[Any], axis: int, index: int | None
) -> list[list[Any]]:
    """For each leaf, the element at ``index`` in a list, or all of them."""
    taken: list[list[Any]] = []
    # What is cut alike from the same device is cut by one program.
    work: dict[tuple[jax.Device, bool], list[tuple[_Part, list[Any]]]] = {}
    for number, leaf in enumerate(leaves):
        try:
            dimension, element = _normalized(np.shape(leaf), axis, index)
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
                taken.append(_indexed(leaf, dimension, element))
                continue
            parts = _parts(leaf, dimension, element)
        except (IndexError, ValueError) as error:
            raise type(error)(f"{caller}: {_name(tree, number)} {error}") from None
        pieces: list[Any] = [None] * (leaf.shape[dimension] if element is None else 1)
        taken.append(pieces)
        for part in parts:
            work.setdefault((part.device, part.every), []).append((part, pieces))
    for (device, every), jobs in work.items():
        cut = _Cut(tuple(part.axis for part, _ in jobs), every)
        shards = [part.shard for part, _ in jobs]
        offsets = [] if every else [np.int32(part.offset) for part, _ in jobs]
        results = iter(run_on(device, cut, [*shards, *offsets]))
        for part, pieces in jobs:
            for k in range(part.shard.shape[part.axis] if every else 1):
                pieces[part.first + k] = next(results)
    return taken


def _parts(array: jax.Array, axis: int, element: int | None) -> list[_Part]:
    """What to take of which shard, for one element or for all."""
    size, holders = _blocks(array.sharding, array.shape, axis)
    if element is None:
        wanted = range(array.shape[axis] // size)
    else:
        wanted = range(element // size, element // size + 1)
    parts = []
    for block in wanted:
        if block not in holders:
            raise ValueError(
                f"has its elements {block * size} to {(block + 1) * size - 1} along "
                f"axis {axis} on a device of another process"
            )
        number, device = holders[block]
        shard = array.addressable_data(number)
        if element is None:
            part = _Part(device, shard, axis, True, 0, first=block * size)
        else:
            # A block of one element is wanted whole, which is cheaper.
            part = _Part(device, shard, axis, size == 1, element % size, first=0)
        parts.append(part)
    return parts


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


def _indexed(leaf: Any, axis: int, index: int | None) -> list[Any]:
    """As `_take`, of what is on no device: a tracer, or an array on the host."""
    wanted = range(np.shape(leaf)[axis]) if index is None else [index]
    return [leaf[(slice(None),) * axis + (k,)] for k in wanted]


def _name(tree: Any, number: int) -> str:
    path, _ = jax.tree_util.tree_leaves_with_path(tree)[number]
    return f"x{jax.tree_util.keystr(path)}"
