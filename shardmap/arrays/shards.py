"""Taking arrays apart: the elements of an axis, each from the device that holds it.

``y[i]`` on an array that is on several devices is a program over all of them, and so
is its result. The functions here read the one device that holds element ``i``.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardmap._jax.context import concrete_mesh, nothing_is_traced, uncommitted
from shardmap._jax.types import Value
from shardmap.arrays.array_likes import boxes
from shardmap.arrays.trees import leaf_paths
from shardmap.units import shown

T = TypeVar("T")


def shard_of(x: T, i: int | tuple[int, ...], *, axis: int = 0) -> T:
    """Returns element ``i`` of an array along an axis, on the device that holds it.

    The value is ``x[i]``, without communication. For a pytree, each leaf is indexed. (A
    `Shard` is something else: one part of the work of a `plan`.)

    ``i`` may index several axes, beginning with ``axis``: ``shard_of(x, (1, 2))`` is
    ``x[1, 2]``, an element of a map in a map. If several devices hold copies, the first
    is read.

    The result is not committed to its device: it can be combined with arrays on any
    device, and `jax.jit` of it alone runs on the default device. To compute on the
    device of the result, commit it with ``jax.device_put(part, part.device)``.

    Args:
      x: an array, or a pytree of arrays. NumPy arrays and tracers are indexed as
        ``x[i]``.
      i: an int, negative from the end, or a tuple of ints.
      axis: the axis to index, negative from the end; the first one if ``i`` is a tuple.

    Raises:
      TypeError: ``i`` is not an index of this kind, such as a slice.
      ValueError: the element is on several devices, such as ``x[1]`` of a map in a
        map, or the device belongs to another process, or there is no such axis.
      IndexError: ``i`` is out of range.

    Example:
      >>> import numpy as np
      >>> y = jax.device_put(np.arange(6).reshape(2, 3), jax.devices()[0])
      >>> shard_of(y, 1)
      Array([3, 4, 5], dtype=int32)
      >>> shard_of(y, (1, 2))
      Array(5, dtype=int32)
    """
    index = tuple(map(_integer, i)) if isinstance(i, tuple) else (_integer(i),)
    leaves, tree = jax.tree.flatten(x)
    parts = _of_each("shard_of", x, leaves, lambda leaf: _element(leaf, axis, index))
    return jax.tree.unflatten(tree, parts)


@overload
def unstack(x: T, *, axis: int = 0) -> list[T]: ...


@overload
def unstack(x: T, *, axis: tuple[int, ...]) -> list[Any]: ...


def unstack(x: Any, *, axis: int | tuple[int, ...] = 0) -> list[Any]:
    """Returns all elements along an axis, each on the device that holds it.

    The result is ``[shard_of(x, 0), shard_of(x, 1), ...]``, with one program for each
    device that holds some.

    Args:
      x: as for `shard_of`. All leaves have the same length along ``axis``.
      axis: the axis, negative from the end. Several axes give lists of lists:
        ``unstack(x, axis=(0, 1))[1][2]`` is ``x[1, 2]``.

    Returns:
      A list of arrays, or of pytrees like ``x``.

    Raises:
      ValueError: as for `shard_of`; or leaves differ in length, or there are none.

    Example:
      >>> import numpy as np
      >>> unstack({"a": np.arange(2), "b": np.zeros((2, 3))})[1]["a"]
      np.int64(1)
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    leaves, tree = jax.tree.flatten(x)
    taken = _of_each("unstack", x, leaves, lambda leaf: _elements(leaf, axes))
    sizes = [tuple(np.shape(leaf)[one] for one in axes) for leaf in leaves]
    if not leaves:
        raise ValueError(f"unstack needs arrays to take apart, got {shown(x)}")
    if other := next((k for k, size in enumerate(sizes) if size != sizes[0]), None):
        names, counts = leaf_paths("x", x), [" x ".join(map(str, s)) for s in sizes]
        raise ValueError(
            f"unstack needs arrays with equally many elements along axis {axis}: "
            f"{names[0]} has {counts[0]}, {names[other]} has {counts[other]}"
        )
    elements = (jax.tree.unflatten(tree, parts) for parts in zip(*taken, strict=True))
    nested: list[Any] = np.fromiter(elements, dtype=object).reshape(sizes[0]).tolist()
    return nested


def unreplicate(tree: T, *, axis: int = 0) -> T:
    """Returns element 0 of each array of a pytree, for arrays whose elements are equal.

    This is ``shard_of(tree, 0)``, like `flax.jax_utils.unreplicate`. For arrays over
    several processes it is the first element on this process.

    Args:
      tree: as for `shard_of`.
      axis: the mapped axis, which is removed.

    Raises:
      ValueError: as for `shard_of`.
      IndexError: the axis has no elements.

    Example:
      >>> import numpy as np
      >>> unreplicate({"w": np.ones((8, 2))})
      {'w': array([1., 1.])}
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = _of_each("unreplicate", tree, leaves, lambda leaf: _first(leaf, axis))
    return jax.tree.unflatten(structure, parts)


def _integer(i: SupportsIndex) -> int:
    try:
        return operator.index(i)
    except TypeError:
        slices = " To take a slice, index the array itself, as x[2:4]."
        raise TypeError(
            "shard_of takes an int or a tuple of ints as i, but got "
            f"{shown(i)} of type {type(i).__name__}."
            f"{slices if isinstance(i, slice) else ''}"
        ) from None


def _of_each(
    caller: str, tree: Any, leaves: Sequence[Any], take: Callable[[Any], Any]
) -> list[Any]:
    """What ``take`` gives for each leaf; its errors get the name of the leaf."""
    taken = []
    for k, leaf in enumerate(leaves):
        try:
            taken.append(take(leaf))
        except (IndexError, ValueError) as error:
            name = leaf_paths("x", tree)[k]
            raise type(error)(f"{caller}: {name} {error}") from None
    return taken


# One leaf


class _Tiles(NamedTuple):
    """How some axes of an array lie on the devices of this process.

    Attributes:
      sizes: of one device's part of these axes.
      shards: the number of the first shard of each part, by its place along them.
    """

    sizes: tuple[int, ...]
    shards: dict[tuple[int, ...], int]


@functools.lru_cache(maxsize=4096)
def _tiles(sharding: Sharding, shape: tuple[int, ...], axes: tuple[int, ...]) -> _Tiles:
    held = sharding.shard_shape(shape)
    for d in range(len(shape)):
        if d not in axes and held[d] < shape[d]:
            raise ValueError(
                f"of shape {shape} is cut along axis {d} too, and each element is on "
                f"{shape[d] // held[d]} devices: index that axis as well, or use x[i] "
                "or jax.device_get(x)."
            )
    shards: dict[tuple[int, ...], int] = {}
    for number, box in enumerate(boxes(sharding, shape).values()):
        shards.setdefault(tuple(box[d][0] // (held[d] or 1) for d in axes), number)
    return _Tiles(tuple(held[d] for d in axes), shards)


def _is_on_devices(leaf: Value) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _from_front(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"of shape {shape} has no axis {axis}")
    return axis % len(shape)


def _element(leaf: Value, axis: int, index: tuple[int, ...]) -> Any:
    """The element at these indices along an axis and those after it."""
    if not _is_on_devices(leaf):
        axes = _checked_axes(np.shape(leaf), axis, index)
        return leaf[(*[slice(None)] * axes[0], *index)]
    number, axes, offsets = _place(leaf.sharding, leaf.shape, axis, index)
    [part] = _run(_take, leaf.addressable_data(number), axes, offsets)
    return part


def _checked_axes(
    shape: tuple[int, ...], axis: int, index: tuple[int, ...]
) -> tuple[int, ...]:
    first = _from_front(shape, axis)
    axes = tuple(_from_front(shape, first + k) for k in range(len(index)))
    for d, k in zip(axes, index, strict=True):
        if not -shape[d] <= k < shape[d]:
            raise IndexError(
                f"of shape {shape} has size {shape[d]} along axis {d}: index {k} is "
                "out of range"
            )
    return axes


@functools.lru_cache(maxsize=4096)
def _place(
    sharding: Sharding, shape: tuple[int, ...], axis: int, index: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The shard with an element, the axes to drop, and the offsets along these."""
    axes = _checked_axes(shape, axis, index)
    tiles = _tiles(sharding, shape, axes)
    counted = (k % shape[d] for d, k in zip(axes, index, strict=True))
    tile, offsets = zip(*map(divmod, counted, tiles.sizes), strict=True)
    if tile not in tiles.shards:
        _refuse_elsewhere(axes, index)
    return tiles.shards[tile], axes, offsets


def _first(leaf: Value, axis: int) -> Any:
    """The first element along an axis, of those on this process."""
    index = 0
    if _is_on_devices(leaf):
        tiles = _tiles(leaf.sharding, leaf.shape, (_from_front(leaf.shape, axis),))
        index = min(tiles.shards)[0] * tiles.sizes[0]
    return _element(leaf, axis, (index,))


def _elements(leaf: Value, axes: Sequence[int]) -> list[Any]:
    """All elements along some axes, row-major."""
    shape = np.shape(leaf)
    dropped = tuple(_from_front(shape, axis) for axis in axes)
    if len(set(dropped)) < len(dropped):
        raise ValueError(f"of shape {shape} has one axis twice in axis={axes}")
    places = list(np.ndindex(*(shape[d] for d in dropped)))
    if not _is_on_devices(leaf):
        return [np.moveaxis(leaf, dropped, range(len(dropped)))[k] for k in places]
    tiles = _tiles(leaf.sharding, shape, dropped)
    parts: dict[tuple[int, ...], Any] = {}
    for tile, number in tiles.shards.items():
        some = _run(_take_all, leaf.addressable_data(number), dropped)
        for offsets, part in zip(np.ndindex(*tiles.sizes), some, strict=True):
            at = zip(tile, tiles.sizes, offsets, strict=True)
            parts[tuple(t * size + offset for t, size, offset in at)] = part
    if missing := [place for place in places if place not in parts]:
        _refuse_elsewhere(dropped, missing[0])
    return [parts[place] for place in places]


def _refuse_elsewhere(axes: Sequence[int], index: Sequence[int]) -> NoReturn:
    where = (
        f"its element {k} along axis {d}" for d, k in zip(axes, index, strict=True)
    )
    raise ValueError(f"has {' and '.join(where)} on a device of another process")


# One shard


def _run(take: Callable[..., list[Any]], shard: jax.Array, *args: Any) -> list[Any]:
    """Parts of a shard, at once, whatever trace and mesh are around."""

    def run() -> list[Any]:
        return list(map(uncommitted, take(shard, *args)))

    if nothing_is_traced() and concrete_mesh().empty:
        return run()
    # In a new thread neither is. In a trace no mesh can be unset.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@functools.partial(jax.jit, static_argnums=1)
def _take(
    shard: jax.Array, axes: Sequence[int], offsets: Sequence[Value]
) -> list[jax.Array]:
    for d, offset in zip(axes, offsets, strict=True):
        shard = jax.lax.dynamic_slice_in_dim(shard, offset, 1, d)
    return [jax.lax.squeeze(shard, axes)]


@functools.partial(jax.jit, static_argnums=1)
def _take_all(shard: jax.Array, axes: Sequence[int]) -> list[jax.Array]:
    shard = jnp.moveaxis(shard, axes, range(len(axes)))
    sizes, element = shard.shape[: len(axes)], shard.shape[len(axes) :]
    shard = shard.reshape(math.prod(sizes), *element)
    return [
        jax.lax.index_in_dim(shard, k, keepdims=False) for k in range(shard.shape[0])
    ]
