"""Putting arrays together: one shard for each device, with no stacked copy."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from shardmap._jax.context import without_mesh
from shardmap._jax.types import Axes, PyTree, Value
from shardmap.arrays import array_likes, placement, processes, trees
from shardmap.arrays.on_device import operand, program
from shardmap.arrays.running import map_jit
from shardmap.sharding.mesh import check_devices, too_few_devices
from shardmap.sharding.spec import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
)
from shardmap.units import integer_of

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
    with _outside_of_programs():
        put = zip(*_put_rows(rows, axes, devices), strict=True)
        arrays = [
            jax.make_array_from_single_device_arrays(
                _with_axis(np.shape(leaf), k, len(devices)),
                _sharding(k, len(devices), devices),
                list(column),
            )
            for leaf, k, column in zip(rows[0], axes, put, strict=True)
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
    # All arrays are put at once, and all leaves that are on the host.
    of_jax = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    others = [k for k in range(len(leaves)) if k not in set(of_jax)]
    copied: dict[int, jax.Array] = {}
    with _outside_of_programs():
        for put, which in ((_copy_arrays, of_jax), (_copy_from_host, others)):
            chosen = tuple(axes[k] for k in which)
            arrays = put([leaves[k] for k in which], chosen, size, devices)
            copied.update(zip(which, arrays, strict=True))
    return jax.tree.unflatten(tree, [copied[k] for k in range(len(leaves))])


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


def _put_rows(
    rows: Sequence[Sequence[Any]], axes: Sequence[int], devices: Devices
) -> list[list[jax.Array]]:
    """Row ``k`` on device ``k``, each array with its new axis of size 1."""
    host = [
        (r, c)
        for r, row in enumerate(rows)
        for c, leaf in enumerate(row)
        if not isinstance(leaf, jax.Array)
    ]
    arrays = [np.expand_dims(_on_host(rows[r][c]), axes[c]) for r, c in host]
    put = dict(
        zip(host, jax.device_put(arrays, [devices[r] for r, _ in host]), strict=True)
    )
    for r, (row, device) in enumerate(zip(rows, devices, strict=True)):
        columns = [c for c, leaf in enumerate(row) if isinstance(leaf, jax.Array)]
        if not columns:
            continue
        there = [SingleDeviceSharding(device)] * len(columns)
        moved = placement.place([row[c] for c in columns], there, uncommitted=True)
        expand = _Expand(tuple(axes[c] for c in columns))
        expanded = program(device, expand, tuple(map(operand, moved)))(*moved)
        put.update(((r, c), each) for c, each in zip(columns, expanded, strict=True))
    return [[put[r, c] for c in range(len(row))] for r, row in enumerate(rows)]


@dataclass(frozen=True)
class _Expand:
    """A program that gives each array a new axis of size 1."""

    axes: tuple[int, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return [
            jax.lax.expand_dims(array, (axis,))
            for array, axis in zip(arrays, self.axes, strict=True)
        ]


def _copy_from_host(
    leaves: Sequence[Any], axes: Axes, size: int, devices: Devices
) -> Sequence[jax.Array]:
    """Copies of NumPy arrays and scalars on all devices."""
    arrays = list(map(_on_host, leaves))
    shapes = [_with_axis(a.shape, k, size) for a, k in zip(arrays, axes, strict=True)]
    shardings = [_sharding(k, size, devices) for k in axes]
    shards = [
        array if k is None else np.expand_dims(array, k)
        for array, k in zip(arrays, axes, strict=True)
    ]
    if not processes.several(devices):
        # A broadcast takes no memory, and JAX cuts each shard from it as a view.
        return jax.device_put(list(map(np.broadcast_to, shards, shapes)), shardings)
    # `jax.device_put` would compare the values of all processes.
    here = [d for d in devices if d.process_index == jax.process_index(d.client)]
    return [
        jax.make_array_from_single_device_arrays(
            shape, sharding, jax.device_put([shard] * len(here), here)
        )
        for shape, sharding, shard in zip(shapes, shardings, shards, strict=True)
    ]


def _copy_arrays(
    leaves: Sequence[jax.Array], axes: Axes, size: int, devices: Devices
) -> Sequence[jax.Array]:
    """Copies of arrays on all devices, from device to device."""
    everywhere = [_sharding(None, size, devices)] * len(leaves)
    copies = placement.place(leaves, everywhere, uncommitted=True)
    if None in axes or not copies:
        return copies
    results: Sequence[jax.Array] = _expanding(axes, size, devices)(*copies)
    return results


@functools.lru_cache(maxsize=1024)
def _expanding(axes: tuple[Any, ...], size: int, devices: Devices) -> Any:
    """A program that cuts arrays along a new axis, of which all devices have copies."""

    def expand(*arrays: jax.Array) -> list[jax.Array]:
        return [
            jnp.broadcast_to(
                jnp.expand_dims(array, axis), _with_axis(array.shape, axis, size)
            )
            for array, axis in zip(arrays, axes, strict=True)
        ]

    shardings = [_sharding(axis, size, devices) for axis in axes]
    return map_jit(expand, devices, communicates=False, out_shardings=shardings)


def _on_host(leaf: Value) -> np.ndarray:
    """A scalar or array-like as NumPy array, of the dtype it has on devices."""
    return np.asarray(leaf, array_likes.abstract_value(leaf).dtype)


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
