"""Putting arrays together: one shard for each device, with no stacked copy."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardmap._jax.context import without_mesh
from shardmap._jax.types import PyTree, TreeDef, Value
from shardmap.arrays import array_likes, placement, processes, trees
from shardmap.sharding.mesh import check_devices, too_few_devices
from shardmap.sharding.spec import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
)
from shardmap.units import integer_of, shown

Devices = tuple[jax.Device, ...]


def device_put_sharded(
    shards: Sequence[Any], devices: Sequence[jax.Device], *, axis: int = 0
) -> Any:
    """Puts one shard on each device, and returns them as one array.

    The value is ``stack(shards, axis)``, without a stack on the host. A shard that is
    on its device already is not moved. Like `jax.device_put_sharded` up to JAX 0.9.

    Args:
      shards: an array, or a pytree of arrays, for each device. All have the same
        structure, shapes and dtypes.
      devices: the devices, each once.
      axis: the position of the new axis in the results, negative from the end.

    Returns:
      An array of shape ``(len(devices), *shard.shape)``, or a pytree of such arrays.
      The sharding is a `jax.sharding.NamedSharding` over a mesh of one axis, as
      returned by `pmap_sharding`, which `spmap` accepts without a copy.

    Raises:
      TypeError: ``shards`` is not a sequence, or a leaf of a shard is not an array.
      ValueError: there are no devices, or not as many as shards; a device is given
        twice or belongs to another process; shards differ; or a shard has too few
        dimensions for ``axis``.

    Example:
      >>> y = device_put_sharded([np.arange(3)], jax.local_devices()[:1])
      >>> y
      Array([[0, 1, 2]], dtype=int32)
    """
    if not isinstance(shards, Sequence):
        raise TypeError(
            "device_put_sharded takes a sequence with a shard for each device, got "
            f"{type(shards)}. To cut one array, use jax.device_put with "
            "shardmap.pmap_sharding."
        )
    devices = _check_devices("device_put_sharded", devices)
    if processes.spans_processes(devices):
        raise ValueError(
            "device_put_sharded puts shards on devices of this process, but devices "
            f"{[d.id for d in devices]} are on several. Put this process's shards on "
            "jax.local_devices()."
        )
    if len(shards) != len(devices):
        raise ValueError(
            f"device_put_sharded needs a shard for each device: len(shards) is "
            f"{len(shards)}, len(devices) is {len(devices)}."
            f"{too_few_devices(len(shards))}"
        )
    tree, avals, axes = _read("device_put_sharded", "shards[0]", shards[0], axis)
    columns = _columns(shards, tree, avals)
    if any(map(_has_tracers, columns)):
        stacked = [jnp.stack(each, k) for each, k in zip(columns, axes, strict=True)]
        return jax.tree.unflatten(tree, stacked)
    arrays = [
        _rows_on_devices(column, aval, k, devices)
        for column, aval, k in zip(columns, avals, axes, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def device_put_replicated(
    x: Value,
    devices: Sequence[jax.Device],
    *,
    axis: int | None = 0,
    axis_size: int | None = None,
) -> Any:
    """Puts a copy of an array on each device, and returns them as one array.

    The value is ``stack([x] * len(devices), axis)``, without a stack on the host. Like
    `jax.device_put_replicated` up to JAX 0.9, and `pxla.replicate` before JAX 0.3.

    Args:
      x: an array or a pytree of arrays.
      devices: the devices, each once. If some belong to other processes, each process
        that has some calls this with an equal ``x``.
      axis: the position of the new axis in the results, negative from the end. None:
        there is no new axis, and the results are replicated.
      axis_size: the length of the new axis. Default: the number of devices. If it is
        less, adjacent devices hold copies of the same element, as nested maps expect.

    Returns:
      An array of shape ``(axis_size, *x.shape)``, or a pytree of such arrays, sharded
      as by `device_put_sharded`. If devices hold copies, the mesh has a second axis.

    Raises:
      TypeError: a leaf of ``x`` is not an array.
      ValueError: there are no devices, or none of this process, or one is given
        twice; ``axis_size`` does not divide their number; or an array has too few
        dimensions for ``axis``.

    Example:
      >>> y = device_put_replicated({"w": np.ones(2)}, jax.local_devices()[:1])
      >>> y["w"].shape
      (1, 2)
      >>> device_put_replicated(np.ones(2), jax.local_devices()[:1], axis=1).shape
      (2, 1)
    """
    devices = _check_devices("device_put_replicated", devices)
    processes.spans_processes(devices)  # Refuses devices of other processes only.
    size = _elements(axis, axis_size, devices)
    tree, avals, axes = _read("device_put_replicated", "x", x, axis or 0)
    leaves = jax.tree.leaves(x)
    if axis is None:
        axes = [None] * len(leaves)
    if _has_tracers(leaves):
        stacked = [
            leaf if k is None else jnp.stack([leaf] * size, k)
            for leaf, k in zip(leaves, axes, strict=True)
        ]
        return jax.tree.unflatten(tree, stacked)
    arrays = [
        _copies_on_devices(leaf, aval, k, size, devices)
        for leaf, aval, k in zip(leaves, avals, axes, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def _read(
    caller: str, name: str, tree: PyTree, axis: int
) -> tuple[TreeDef, list[Any], list[Any]]:
    """The structure of a pytree, the aval of each leaf, and its new axis.

    Raises:
      TypeError: a leaf is no array.
      ValueError: it has no place for the axis.
    """
    leaves, structure = jax.tree.flatten(tree)
    avals, axes = [], []
    for k, leaf in enumerate(leaves):
        try:
            avals.append(array_likes.abstract_value(leaf))
        except TypeError:
            path = trees.leaf_paths(name, tree)[k]
            why = (
                array_likes.refusal(leaf) or f"is {shown(leaf)}, which is not an array."
            )
            raise TypeError(f"{caller} takes pytrees of arrays: {path} {why}") from None
        rank = len(avals[k].shape)
        if not -rank - 1 <= axis <= rank:
            raise ValueError(
                f"{caller}: {trees.leaf_paths(name, tree)[k]} has {rank} dimensions, "
                f"so axis {axis} is out of range: give an axis from {-rank - 1} to "
                f"{rank}"
            )
        axes.append(axis % (rank + 1))
    return structure, avals, axes


def _columns(
    shards: Sequence[Any], tree: TreeDef, avals: Sequence[Any]
) -> list[Sequence[Any]]:
    """For each leaf of the first shard, the leaves of all shards.

    Raises:
      ValueError: structures, shapes or dtypes differ.
    """
    leaves, together = jax.tree.flatten(list(shards))
    structures: list[Any] = cast(Any, together).children()
    for k, other in enumerate(structures):
        if other != tree:
            raise ValueError(
                "device_put_sharded needs shards of equal structure: shards[0] is "
                f"{tree}, but shards[{k}] is {other}."
            )
    columns: list[Sequence[Any]] = [leaves[c :: len(avals)] for c in range(len(avals))]
    for c, (column, aval) in enumerate(zip(columns, avals, strict=True)):
        if _are_alike(column):
            continue
        for k, leaf in enumerate(column):
            if kind := _other_kind(leaf, aval):
                path = trees.leaf_paths("", shards[k])[c]
                raise ValueError(
                    "device_put_sharded needs shards of equal shapes and dtypes: "
                    f"shards[{k}]{path} is {kind}, but in shards[0] it is "
                    f"{aval.str_short()}."
                )
    return columns


def _are_alike(leaves: Sequence[Any]) -> bool:
    """Whether all leaves have the type, dtype and shape of the first; never wrong."""
    first, count = leaves[0], len(leaves)
    return (
        [type(leaf) for leaf in leaves].count(type(first)) == count
        and hasattr(first, "dtype")
        and [leaf.dtype for leaf in leaves].count(first.dtype) == count
        and [leaf.shape for leaf in leaves].count(first.shape) == count
    )


def _other_kind(leaf: Value, aval: Any) -> str | None:
    """What a leaf is, if its aval is another one, but for weak types."""
    try:
        own = array_likes.abstract_value(leaf)
    except TypeError:
        return f"{shown(leaf)}, which is not an array"
    is_like = (own.shape, own.dtype) == (aval.shape, aval.dtype)
    return None if is_like else str(own.str_short())


def _has_tracers(leaves: Sequence[Value]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _with_axis(shape: Sequence[int], axis: int | None, size: int) -> tuple[int, ...]:
    return tuple(shape) if axis is None else (*shape[:axis], size, *shape[axis:])


@functools.lru_cache(maxsize=1024)
def _sharding(axis: int | None, size: int, devices: Devices) -> NamedSharding:
    """The sharding of an array of any rank that is cut along a new axis.

    Args:
      axis: the axis; None: each device has all of the array.
      size: its size. If there are more devices, neighbors have copies.
      devices: where the array is.
    """
    if axis is None:
        spec = ShardingSpec((), (Replicated(len(devices)),))
    else:
        copies = len(devices) // size
        copied = [Replicated(copies)] if copies > 1 else []
        spec = ShardingSpec([*[None] * axis, Chunked(size)], [ShardedAxis(0), *copied])
    return spec.named_sharding(devices)


def _rows_on_devices(
    rows: Sequence[Any], aval: Any, axis: int, devices: Devices
) -> jax.Array:
    """An array whose row ``k`` is on device ``k``."""
    shape = _with_axis(aval.shape, axis, len(devices))
    sharding = _sharding(axis, len(devices), devices)
    if any(map(_is_on_devices, rows)):
        parts = [_with_new_axis(row, aval, axis) for row in rows]
        with _outside_of_programs():
            put = jax.device_put(parts, list(devices))
        return jax.make_array_from_single_device_arrays(shape, sharding, put)

    # Half the time of one put of a stack, and a fifth of a put of each row.
    def row(index: Any) -> Any:
        return _with_new_axis(rows[index[axis].start or 0], aval, axis)

    return jax.make_array_from_callback(shape, sharding, row)


def _copies_on_devices(
    leaf: Value, aval: Any, axis: int | None, size: int, devices: Devices
) -> jax.Array:
    """Copies of a leaf on all devices, which are the rows of an array."""
    shape = _with_axis(aval.shape, axis, size)
    sharding = _sharding(axis, size, devices)
    row = _with_new_axis(leaf, aval, axis)
    if not isinstance(row, jax.Array):
        return jax.make_array_from_callback(shape, sharding, lambda index: row)
    everywhere = _sharding(None, size, devices)
    with _outside_of_programs():
        [copies] = placement.place([row], [everywhere], uncommitted=True)
    shards = [shard.data for shard in copies.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _is_on_devices(leaf: Value) -> bool:
    # The first is cheap.
    return type(leaf) is not np.ndarray and isinstance(leaf, jax.Array)


def _with_new_axis(leaf: Value, aval: Any, axis: int | None) -> Any:
    """A leaf with a new axis of size 1, where it is: on the host or on devices."""
    if _is_on_devices(leaf):
        return leaf if axis is None else jnp.expand_dims(leaf, axis)
    # A scalar or array-like, of the dtype that it has on devices.
    array = np.asarray(leaf, aval.dtype)
    return array if axis is None else array[(*[slice(None)] * axis, None)]


@contextlib.contextmanager
def _outside_of_programs() -> Iterator[None]:
    """A context for `jax.device_put` of arrays, eagerly inside of a trace."""
    with jax.ensure_compile_time_eval(), without_mesh():
        yield


def _elements(
    axis: int | None, axis_size: int | None, devices: Sequence[jax.Device]
) -> int:
    """How many elements a new axis has."""
    if axis_size is None:
        return len(devices)
    if axis is None:
        raise ValueError(
            f"device_put_replicated: axis_size is {axis_size}, but with axis=None "
            "there is no new axis: leave it out."
        )
    size = integer_of("device_put_replicated: axis_size", axis_size, least=1)
    if len(devices) % size:
        raise ValueError(
            f"device_put_replicated: axis_size is {size}, which does not divide the "
            f"number of devices, {len(devices)}: some elements would be on more "
            f"devices than others. Give a divisor.{too_few_devices(size)}"
        )
    return size


def _check_devices(caller: str, devices: Sequence[jax.Device]) -> Devices:
    given = check_devices(caller, devices)
    if not given:
        raise ValueError(
            f"{caller} needs at least one device, got {shown(devices)}."
            f"{too_few_devices(2)}"
        )
    return given
