"""Putting arrays together: one shard for each device, with no stacked copy."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardmap._jax.context import without_mesh
from shardmap._jax.types import PyTree, Value
from shardmap.arrays import array_likes, processes, trees
from shardmap.sharding.mesh import check_devices, positive, too_few_devices
from shardmap.sharding.spec import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
)

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
    _check_equal(shards)
    rows = list(map(jax.tree.leaves, shards))
    tree = jax.tree.structure(shards[0])
    axes = _new_axes("device_put_sharded", "shards[0]", shards[0], axis)
    if any(map(_has_tracers, rows)):
        columns = zip(*rows, strict=True)
        stacked = [jnp.stack(each, k) for each, k in zip(columns, axes, strict=True)]
        return jax.tree.unflatten(tree, stacked)
    arrays = [
        _joined([_expanded(leaf, k) for leaf in column], k, len(devices), devices)
        for k, column in zip(axes, zip(*rows, strict=True), strict=True)
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
      ValueError: there are no devices, or one is given twice; ``axis_size`` does not
        divide their number; or an array has too few dimensions for ``axis``.

    Example:
      >>> y = device_put_replicated({"w": np.ones(2)}, jax.local_devices()[:1])
      >>> y["w"].shape
      (1, 2)
      >>> device_put_replicated(np.ones(2), jax.local_devices()[:1], axis=1).shape
      (2, 1)
    """
    devices = _check_devices("device_put_replicated", devices)
    size = _elements(axis, axis_size, devices)
    leaves, tree = jax.tree.flatten(x)
    axes: Sequence[int | None] = [None] * len(leaves)
    if axis is not None:
        axes = _new_axes("device_put_replicated", "x", x, axis)
    if _has_tracers(leaves):
        stacked = [
            leaf if k is None else jnp.stack([leaf] * size, k)
            for leaf, k in zip(leaves, axes, strict=True)
        ]
        return jax.tree.unflatten(tree, stacked)
    copies = len(_own(devices))
    arrays = [
        _joined([_expanded(leaf, k)] * copies, k, size, devices)
        for leaf, k in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def _own(devices: Devices) -> list[jax.Device]:
    """Those of this process."""
    return [d for d in devices if d.process_index == jax.process_index(d.client)]


def _has_tracers(leaves: Sequence[Value]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


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


def _expanded(leaf: Value, axis: int | None) -> Any:
    """A leaf with a new axis of size 1, of the dtype that it has on devices."""
    if isinstance(leaf, jax.Array):
        with _outside_of_programs():
            return leaf if axis is None else jnp.expand_dims(leaf, axis)
    array = np.asarray(leaf, array_likes.abstract_value(leaf).dtype)
    return array if axis is None else np.expand_dims(array, axis)


def _joined(
    shards: Sequence[Any], axis: int | None, size: int, devices: Devices
) -> jax.Array:
    """The array that has these shards on the devices of this process."""
    sharding = _sharding(axis, size, devices)
    shape = list(shards[0].shape)
    if axis is not None:
        shape[axis] = size
    with _outside_of_programs():
        put = jax.device_put(list(shards), _own(devices))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, put)


@contextlib.contextmanager
def _outside_of_programs() -> Iterator[None]:
    """A context in which arrays that are no tracers are put as where nothing traces."""
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
    size = positive(axis_size, "device_put_replicated: axis_size")
    if len(devices) % size:
        raise ValueError(
            f"device_put_replicated: axis_size {size} does not divide the "
            f"{len(devices)} devices, so that some elements would be on more devices "
            "than others. Give a divisor, or fewer devices."
        )
    return size


def _new_axes(caller: str, name: str, tree: PyTree, axis: int) -> list[int]:
    """Where the new axis is in each leaf's result, counted from the front."""
    axes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        rank = len(array_likes.abstract_value(leaf).shape)
        if not -rank - 1 <= axis <= rank:
            raise ValueError(
                f"{caller}: {name}{jax.tree_util.keystr(path)} has {rank} dimensions, "
                f"and no place for a new axis {axis}: give an axis from {-rank - 1} to "
                f"{rank}"
            )
        axes.append(axis % (rank + 1))
    return axes


def _check_devices(caller: str, devices: Sequence[jax.Device]) -> Devices:
    given = check_devices(caller, devices)
    if not given:
        raise ValueError(
            f"{caller} needs at least one device, got {devices!r}.{too_few_devices(2)}"
        )
    return given


def _check_equal(shards: Sequence[Any]) -> None:
    """Checks that the shards have one structure, and equal shapes and dtypes."""
    paths = [set(trees.leaf_paths("", shard)) for shard in shards]
    structures: list[Any] = list(map(jax.tree.structure, shards))
    for k, structure in enumerate(structures):
        if structure != structures[0]:
            missing = [
                f"shards[0]{p} is not in shards[{k}]" for p in paths[0] - paths[k]
            ]
            added = [f"shards[{k}]{p} is not in shards[0]" for p in paths[k] - paths[0]]
            raise ValueError(
                "device_put_sharded needs shards of equal structure: shards[0] is "
                f"{structures[0]}, shards[{k}] is {structure}."
                + trees.bullets(sorted([*missing, *added]))
            )
    kinds = [[_kind(leaf) for leaf in jax.tree.leaves(shard)] for shard in shards]
    bad = [
        f"shards[{k}]{path} is {kind}, but in shards[0] it is {first}"
        for k, row in enumerate(kinds)
        for path, kind, first in zip(
            trees.leaf_paths("", shards[0]), row, kinds[0], strict=True
        )
        if kind != first
    ]
    if bad:
        raise ValueError(
            "device_put_sharded needs shards of equal shapes and dtypes:"
            + trees.bullets(bad)
        )


def _kind(leaf: Value) -> str:
    aval = array_likes.abstract_value(leaf)
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
