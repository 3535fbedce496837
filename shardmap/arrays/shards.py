"""Taking arrays apart: the elements of an axis, each from the device that holds it.

``y[i]`` on an array that is on several devices is a program over all of them, and so
is its result. The functions here read the one device that holds element ``i``.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardmap._jax.types import PyTree, Value
from shardmap.arrays.array_likes import boxes
from shardmap.sharding.conversions import axes_in
from shardmap.sharding.spec import Chunked, ShardedAxis, ShardingSpec
from shardmap.units import shown

T = TypeVar("T")

Index: TypeAlias = tuple[int, ...] | Literal["first"] | None
"""One element; the first one on this process; or all of them."""


def shard_of(x: T, i: int | tuple[int, ...], *, axis: int = 0) -> T:
    """Returns element ``i`` of an array along an axis, on the device that holds it.

    The value is ``x[i]``, without communication. For a pytree, each leaf is indexed. (A
    `Shard` is something else: one part of the work of a `plan`.)

    ``i`` may index several axes, beginning with ``axis``: ``shard_of(x, (1, 2))`` is
    ``x[1, 2]``, an element of a map in a map. If several devices hold copies, the first
    is read.

    A result on one device is not committed to it: it can be combined with arrays on any
    device, and `jax.jit` of it alone runs on the default device. To compute on the
    device of the result, commit it with ``jax.device_put(part, part.device)``. A result
    that is sharded itself, such as ``x[1]`` of a map in a map, is committed.

    Args:
      x: an array, or a pytree of arrays. NumPy arrays and tracers are indexed as
        ``x[i]``.
      i: an int, negative from the end, or a tuple of ints.
      axis: the axis to index, negative from the end; the first one if ``i`` is a tuple.

    Raises:
      TypeError: ``i`` is not an index of this kind, such as a slice.
      ValueError: the device belongs to another process, or there is no such axis.
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
    taken = _take("shard_of", x, leaves, (axis,), index)
    return jax.tree.unflatten(tree, [parts[0] for parts in taken])


@overload
def unstack(x: T, *, axis: int = 0) -> list[T]: ...


@overload
def unstack(x: T, *, axis: tuple[int, ...]) -> list[Any]: ...


def unstack(x: Any, *, axis: int | tuple[int, ...] = 0) -> list[Any]:
    """Returns all elements along an axis, each on the device that holds it.

    The result is ``[shard_of(x, 0), shard_of(x, 1), ...]``, taken without
    communication.

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
    leaves, tree = jax.tree.flatten(x)
    axes = axis if isinstance(axis, tuple) else (axis,)
    taken = _take("unstack", x, leaves, axes, None)
    sizes = [tuple(np.shape(leaf)[one] for one in axes) for leaf in leaves]
    if len(set(sizes)) != 1:
        listed = "".join(
            f"\n  * {_name(x, k)} has {' x '.join(map(str, size))}"
            for k, size in enumerate(sizes)
        )
        raise ValueError(
            "unstack needs arrays with equally many elements along axis "
            f"{axis}:{listed or ' there are no arrays'}"
        )
    elements = (jax.tree.unflatten(tree, parts) for parts in zip(*taken, strict=True))
    return _nested(elements, sizes[0])


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
    taken = _take("unreplicate", tree, leaves, (axis,), "first")
    return jax.tree.unflatten(structure, [parts[0] for parts in taken])


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


def _take(
    caller: str, tree: PyTree, leaves: Sequence[Any], axes: Sequence[int], index: Index
) -> list[list[Any]]:
    """For each leaf, the element at ``index`` in a list, or all its elements."""
    taken = []
    for k, leaf in enumerate(leaves):
        try:
            dropped, ranges = _elements(leaf, axes, index)
            places = itertools.product(*ranges)
            taken.append([_element(leaf, dropped, place) for place in places])
        except (IndexError, ValueError) as error:
            message = f"{caller}: {_name(tree, k)} {error}"
            raise type(error)(message) from None
    return taken


def _nested(elements: Iterator[Any], sizes: Sequence[int]) -> Any:
    """Lists of these sizes in each other, filled row-major."""
    if len(sizes) == 1:
        return list(elements)
    return [
        _nested(itertools.islice(elements, math.prod(sizes[1:])), sizes[1:])
        for _ in range(sizes[0])
    ]


def _name(tree: PyTree, leaf: int) -> str:
    path, _ = jax.tree_util.tree_leaves_with_path(tree)[leaf]
    return f"x{jax.tree_util.keystr(path)}"


def _is_on_devices(leaf: Value) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _elements(
    leaf: Value, axes: Sequence[int], index: Index
) -> tuple[tuple[int, ...], list[range]]:
    """The dimensions to remove, and the indices along each."""
    shape = np.shape(leaf)
    if isinstance(index, tuple):
        first = _from_front(shape, axes[0])
        axes = range(first, first + len(index))
    dropped = tuple(_from_front(shape, axis) for axis in axes)
    if len(set(dropped)) < len(dropped):
        raise ValueError(f"of shape {shape} lacks an axis once only, got {tuple(axes)}")
    if index is None:
        return dropped, [range(shape[d]) for d in dropped]
    if index == "first":
        held = boxes(leaf.sharding, shape).values() if _is_on_devices(leaf) else []
        index = (min((box[dropped[0]][0] for box in held), default=0),)
    for d, k in zip(dropped, index, strict=True):
        if not -shape[d] <= k < shape[d]:
            raise IndexError(
                f"of shape {shape} has size {shape[d]} along axis {d}: index {k} is "
                "out of range"
            )
    counted = [k % shape[d] for d, k in zip(dropped, index, strict=True)]
    return dropped, [range(k, k + 1) for k in counted]


def _from_front(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"of shape {shape} has no axis {axis}")
    return axis % len(shape)


def _element(leaf: Value, dropped: tuple[int, ...], place: tuple[int, ...]) -> Any:
    """The element at ``place`` along the dimensions that are removed."""
    if not _is_on_devices(leaf):
        at = dict(zip(dropped, place, strict=True))
        return leaf[tuple(at.get(d, slice(None)) for d in range(leaf.ndim))]
    # Arrays of keys have no weak type.
    kind = leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    parts, joined = _parts(kind, leaf.sharding, dropped, place)
    taken = [run(leaf.addressable_data(n), *starts) for n, run, starts in parts]
    if joined is None:
        return taken[0]
    shape = tuple(size for d, size in enumerate(leaf.shape) if d not in dropped)
    return jax.make_array_from_single_device_arrays(shape, joined, taken)


_Kind: TypeAlias = tuple[tuple[int, ...], Any, bool]
"""The shape, dtype and weak type of an array."""


@functools.lru_cache(maxsize=4096)
def _parts(
    kind: _Kind, sharding: Sharding, dropped: tuple[int, ...], place: tuple[int, ...]
) -> tuple[list[tuple[int, Callable[..., jax.Array], list[np.int32]]], Any]:
    """The shards that hold an element: of replicas, the first on this process.

    Returns:
      For each, its number, the program that takes its part of the element, and where it
      is in the shard; and the sharding of the element, None on one device.
    """
    shape, dtype, weak_type = kind
    held = sharding.shard_shape(shape)
    kept = [d for d in range(len(shape)) if d not in dropped]
    # By the place of the part in the element.
    holders: dict[tuple[int, ...], tuple[int, jax.Device, list[np.int32]]] = {}
    for number, (device, box) in enumerate(boxes(sharding, shape).items()):
        bounds = [box[d] for d in dropped]
        if all(a <= k < b for k, (a, b) in zip(place, bounds, strict=True)):
            starts = [np.int32(k - a) for k, (a, _) in zip(place, bounds, strict=True)]
            where = tuple(box[d][0] for d in kept)
            holders.setdefault(where, (number, device, starts))
    counts = [-(-shape[d] // max(held[d], 1)) for d in kept]
    if len(holders) < math.prod(counts):
        there = " and ".join(
            f"its element {k} along axis {d}"
            for k, d in zip(place, dropped, strict=True)
        )
        raise ValueError(f"has {there} on a device of another process")
    found = [holders[where] for where in sorted(holders)]
    parts = [
        (number, _program(device, (held, dtype, weak_type), dropped), starts)
        for number, device, starts in found
    ]
    if len(found) == 1:
        return parts, None
    return parts, _joined(sharding, kept, counts, [device for _, device, _ in found])


def _joined(
    sharding: Sharding,
    kept: Sequence[int],
    counts: Sequence[int],
    devices: Sequence[jax.Device],
) -> NamedSharding:
    """The sharding of an element on several devices, cut as the array."""
    if not isinstance(sharding, NamedSharding):
        entries = [Chunked(n) if n > 1 else None for n in counts]
        axes = [ShardedAxis(k) for k in range(sum(n > 1 for n in counts))]
        return ShardingSpec(entries, axes).named_sharding(devices)
    spec = [sharding.spec[d] if d < len(sharding.spec) else None for d in kept]
    sizes = {name: sharding.mesh.shape[name] for e in spec for name in axes_in(e)}
    grid = np.array(devices, dtype=object).reshape(tuple(sizes.values()))
    return NamedSharding(Mesh(grid, tuple(sizes)), PartitionSpec(*spec))


@functools.lru_cache(maxsize=1024)
def _program(
    device: jax.Device, kind: _Kind, dropped: tuple[int, ...]
) -> Callable[..., jax.Array]:
    """A program on a device that takes an element of a shard, given where it is.

    `jax.jit` of a shard would commit its result to the device. A program that is
    compiled for uncommitted arrays takes committed ones too, and commits no result.
    """
    shape, dtype, weak_type = kind

    def take(shard: Any, *starts: Any) -> Any:
        for start, d in sorted(zip(starts, dropped, strict=True), key=lambda p: -p[1]):
            shard = jax.lax.dynamic_index_in_dim(shard, start, d, keepdims=False)
        return shard

    def compiled() -> Any:
        # The dtype is that of an array that exists, so it must not be narrowed.
        with jax.default_device(device), jax.enable_x64(True):
            struct = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
            return jax.jit(take).lower(struct, *[np.int32()] * len(dropped)).compile()

    # In a new thread no mesh is set and no trace is around.
    with ThreadPoolExecutor(1) as thread:
        program = thread.submit(compiled).result()

    def run(*args: Any) -> Any:
        try:
            return program(*args)
        except ValueError:
            # The program refuses host memory, unusual layouts and `jax.disable_jit`.
            return take(*args)

    return run
