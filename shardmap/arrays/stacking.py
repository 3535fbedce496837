"""Putting arrays together: one shard for each device, with no stacked copy."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardmap._jax.context import without_mesh
from shardmap._jax.types import Aval, Axes, PyTree, TreeDef, Value
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
    if processes.several(devices):
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
    rows, tree = _equal_rows(shards)
    axes = _new_axes("device_put_sharded", "shards[0]", shards[0], axis)
    columns = list(zip(*rows, strict=True))
    if any(map(_has_tracers, rows)):
        stacked = [jnp.stack(each, k) for each, k in zip(columns, axes, strict=True)]
        return jax.tree.unflatten(tree, stacked)
    with _outside_of_programs():
        arrays = _stack_on_devices(columns, axes, devices)
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
    processes.several(devices)  # Refuses devices of other processes only.
    size = _elements(axis, axis_size, devices)
    leaves, tree = jax.tree.flatten(x)
    axes: Axes = (None,) * len(leaves)
    if axis is not None:
        axes = tuple(_new_axes("device_put_replicated", "x", x, axis))
    if _has_tracers(leaves):
        stacked = [
            leaf if k is None else jnp.stack([leaf] * size, k)
            for leaf, k in zip(leaves, axes, strict=True)
        ]
        return jax.tree.unflatten(tree, stacked)
    with _outside_of_programs():
        arrays = _copies_on_devices(leaves, axes, size, devices)
    return jax.tree.unflatten(tree, arrays)


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


def _stack_on_devices(
    columns: Sequence[Sequence[Any]], axes: Sequence[int], devices: Devices
) -> list[jax.Array]:
    """An array of each column, whose leaf ``k`` is on device ``k``."""
    parts = [
        _with_new_axis(leaf, axis)
        for column, axis in zip(columns, axes, strict=True)
        for leaf in column
    ]
    put = iter(jax.device_put(parts, [*devices] * len(columns)))
    return [
        jax.make_array_from_single_device_arrays(
            _with_axis(np.shape(column[0]), axis, len(devices)),
            _sharding(axis, len(devices), devices),
            list(itertools.islice(put, len(devices))),
        )
        for column, axis in zip(columns, axes, strict=True)
    ]


def _copies_on_devices(
    leaves: Sequence[Any], axes: Axes, size: int, devices: Devices
) -> list[jax.Array]:
    """Copies of each leaf on all devices, which are the rows of an array."""
    parts = list(map(_with_new_axis, leaves, axes))
    everywhere = [_sharding(None, size, devices)] * len(leaves)
    copies = placement.place(parts, everywhere, uncommitted=True)
    return [
        copy
        if axis is None
        else jax.make_array_from_single_device_arrays(
            _with_axis(np.shape(leaf), axis, size),
            _sharding(axis, size, devices),
            [shard.data for shard in copy.addressable_shards],
        )
        for leaf, axis, copy in zip(leaves, axes, copies, strict=True)
    ]


def _with_new_axis(leaf: Value, axis: int | None) -> Any:
    """A leaf with a new axis of size 1, where it is: on the host or on devices."""
    if isinstance(leaf, jax.Array):
        return leaf if axis is None else jnp.expand_dims(leaf, axis)
    # A scalar or array-like, of the dtype that it has on devices.
    array = np.asarray(leaf, array_likes.abstract_value(leaf).dtype)
    return array if axis is None else np.expand_dims(array, axis)


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


def _new_axes(caller: str, name: str, tree: PyTree, axis: int) -> list[int]:
    """Where the new axis is in each leaf's result, counted from the front."""
    ranks = [len(aval.shape) for aval in _avals(caller, name, tree)]
    for k, rank in enumerate(ranks):
        if not -rank - 1 <= axis <= rank:
            raise ValueError(
                f"{caller}: {trees.leaf_paths(name, tree)[k]} has {rank} dimensions, "
                f"and no place for a new axis {axis}: give an axis from {-rank - 1} to "
                f"{rank}"
            )
    return [axis % (rank + 1) for rank in ranks]


def _avals(caller: str, name: str, tree: PyTree) -> list[Any]:
    """The avals of the leaves.

    Raises:
      TypeError: names a leaf that is no array.
    """
    avals = []
    for k, leaf in enumerate(jax.tree.leaves(tree)):
        try:
            avals.append(array_likes.abstract_value(leaf))
        except TypeError:
            path = trees.leaf_paths(name, tree)[k]
            why = (
                array_likes.refusal(leaf) or f"is {shown(leaf)}, which is not an array."
            )
            raise TypeError(f"{caller} takes pytrees of arrays: {path} {why}") from None
    return avals


def _check_devices(caller: str, devices: Sequence[jax.Device]) -> Devices:
    given = check_devices(caller, devices)
    if not given:
        raise ValueError(
            f"{caller} needs at least one device, got {shown(devices)}."
            f"{too_few_devices(2)}"
        )
    return given


def _equal_rows(shards: Sequence[Any]) -> tuple[list[list[Any]], TreeDef]:
    """The leaves of each shard, and the structure of all.

    Raises:
      ValueError: structures, shapes or dtypes differ.
    """
    flat = [jax.tree.flatten(shard) for shard in shards]
    rows: list[list[Any]] = [row for row, _ in flat]
    trees_of_shards: list[Any] = [tree for _, tree in flat]
    if any(tree != trees_of_shards[0] for tree in trees_of_shards):
        raise ValueError(_unequal_structures(shards))
    kinds = _avals("device_put_sharded", "shards[0]", shards[0])
    bad = [
        f"shards[{k}]{trees.leaf_paths('', shards[0])[c]} is {_kind(leaf)}, but in "
        f"shards[0] it is {_kind(rows[0][c])}"
        for k, row in enumerate(rows)
        for c, leaf in enumerate(row)
        if not _is_of_kind(leaf, rows[0][c], kinds[c])
    ]
    if bad:
        raise ValueError(
            "device_put_sharded needs shards of equal shapes and dtypes:"
            + trees.bullets(bad)
        )
    return rows, trees_of_shards[0]


def _is_of_kind(leaf: Value, first: Value, kind: Aval) -> bool:
    """Whether a leaf has the aval ``kind`` of the first, but for weak types."""
    if type(leaf) is type(first) and hasattr(leaf, "dtype"):
        return leaf.dtype == first.dtype and leaf.shape == first.shape
    try:
        aval = array_likes.abstract_value(leaf)
    except TypeError:
        return False
    return bool(aval.dtype == kind.dtype and aval.shape == kind.shape)


def _unequal_structures(shards: Sequence[Any]) -> str:
    structures: list[Any] = list(map(jax.tree.structure, shards))
    k = next(k for k, tree in enumerate(structures) if tree != structures[0])
    first, other = (set(trees.leaf_paths("", shards[j])) for j in (0, k))
    missing = [f"shards[0]{p} is not in shards[{k}]" for p in first - other]
    added = [f"shards[{k}]{p} is not in shards[0]" for p in other - first]
    return (
        "device_put_sharded needs shards of equal structure: shards[0] is "
        f"{structures[0]}, shards[{k}] is {structures[k]}."
        + trees.bullets(sorted([*missing, *added]))
    )


def _kind(leaf: Value) -> str:
    try:
        aval = array_likes.abstract_value(leaf)
    except TypeError:
        return f"{shown(leaf)}, which is not an array"
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
