"""Putting arrays together: one shard for each device, with no stacked copy."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from shardmap._jax.context import without_mesh
from shardmap._jax.types import PyTree, TreeDef, Value
from shardmap.arrays import array_likes, processes, trees
from shardmap.sharding.mesh import check_devices, pmap_sharding, too_few_devices
from shardmap.units import shown

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
    return _put("device_put_sharded", "shards[0]", shards, axis, devices)


def device_put_replicated(
    x: Value, devices: Sequence[jax.Device], *, axis: int = 0
) -> Any:
    """Puts a copy of an array on each device, and returns them as one array.

    The value is ``stack([x] * len(devices), axis)``, without a stack on the host. Like
    `jax.device_put_replicated` up to JAX 0.9.

    Args:
      x: an array or a pytree of arrays.
      devices: the devices, each once. If some belong to other processes, each process
        that has some calls this with an equal ``x``.
      axis: the position of the new axis in the results, negative from the end.

    Returns:
      An array of shape ``(len(devices), *x.shape)``, or a pytree of such arrays,
      sharded as by `device_put_sharded`.

    Raises:
      TypeError: a leaf of ``x`` is not an array.
      ValueError: there are no devices, or none of this process, or one is given
        twice; or an array has too few dimensions for ``axis``.

    Example:
      >>> y = device_put_replicated({"w": np.ones(2)}, jax.local_devices()[:1])
      >>> y["w"].shape
      (1, 2)
      >>> device_put_replicated(np.ones(2), jax.local_devices()[:1], axis=1).shape
      (2, 1)
    """
    devices = _check_devices("device_put_replicated", devices)
    processes.spans_processes(devices)  # Refuses devices of other processes only.
    return _put("device_put_replicated", "x", [x] * len(devices), axis, devices)


def _check_devices(caller: str, devices: Sequence[jax.Device]) -> Devices:
    given = check_devices(caller, devices)
    if not given:
        raise ValueError(
            f"{caller} needs at least one device, got {shown(devices)}."
            f"{too_few_devices(2)}"
        )
    return given


def _put(
    caller: str, first: str, shards: Sequence[PyTree], axis: int, devices: Devices
) -> PyTree:
    """Stacks one pytree for each device, all of one kind, along a new axis."""
    tree, avals = _read(caller, first, shards[0], axis)
    leaves, together = jax.tree.flatten(list(shards))
    structures: list[Any] = cast(Any, together).children()
    for k, other in enumerate(structures):
        if other != tree:
            raise ValueError(
                f"{caller} needs shards of equal structure: shards[0] is {tree}, but "
                f"shards[{k}] is {other}."
            )
    arrays = []
    for number, aval in enumerate(avals):
        column = leaves[number :: len(avals)]
        if not _are_alike(column):
            _check_kinds(caller, shards, number, column, aval)
        place = axis % (aval.ndim + 1)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in column):
            arrays.append(jnp.stack(column, place))
        else:
            arrays.append(_rows_on_devices(column, aval, place, devices))
    return jax.tree.unflatten(tree, arrays)


def _read(caller: str, name: str, tree: PyTree, axis: int) -> tuple[TreeDef, list[Any]]:
    """The structure of a pytree, and the aval of each leaf, which has the new axis."""
    leaves, structure = jax.tree.flatten(tree)
    avals: list[Any] = []
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
    return structure, avals


def _are_alike(leaves: Sequence[Any]) -> bool:
    """Whether all leaves have the type, dtype and shape of the first; never wrong."""
    first, count = leaves[0], len(leaves)
    return (
        [type(leaf) for leaf in leaves].count(type(first)) == count
        and hasattr(first, "dtype")
        and [leaf.dtype for leaf in leaves].count(first.dtype) == count
        and [leaf.shape for leaf in leaves].count(first.shape) == count
    )


def _check_kinds(
    caller: str, shards: Sequence[PyTree], number: int, column: Sequence[Any], aval: Any
) -> None:
    """Checks that leaves are arrays like the first, but for weak types."""
    for k, leaf in enumerate(column):
        try:
            kind = array_likes.abstract_value(leaf)
            if (kind.shape, kind.dtype) == (aval.shape, aval.dtype):
                continue
            told = kind.str_short()
        except TypeError:
            told = f"{shown(leaf)}, which is not an array"
        path = trees.leaf_paths(f"shards[{k}]", shards[k])[number]
        raise ValueError(
            f"{caller} needs shards of equal shapes and dtypes: {path} is {told}, but "
            f"in shards[0] it is {aval.str_short()}."
        )


_sharding = functools.lru_cache(maxsize=1024)(pmap_sharding)


def _rows_on_devices(
    rows: Sequence[Any], aval: Any, axis: int, devices: Devices
) -> jax.Array:
    """An array whose row ``k`` is on device ``k``."""
    shape = (*aval.shape[:axis], len(devices), *aval.shape[axis:])
    sharding = _sharding(shape, axis, devices)
    if not any(map(_is_on_devices, rows)):
        parts = _with_new_axis(rows, aval, axis)

        def row(index: Any) -> Any:
            return parts[id(rows[index[axis].start or 0])]

        # Half the time of one put of a stack, and a fifth of a put of each row.
        return jax.make_array_from_callback(shape, sharding, row)
    here = [k for k, d in enumerate(devices) if d in sharding.addressable_devices]
    # Eagerly, also inside of a trace.
    with jax.ensure_compile_time_eval(), without_mesh():
        parts = _with_new_axis(rows, aval, axis)
        put = jax.device_put(
            [parts[id(rows[k])] for k in here], [devices[k] for k in here]
        )
    return jax.make_array_from_single_device_arrays(shape, sharding, put)


def _is_on_devices(leaf: Value) -> bool:
    # The first is cheap.
    return type(leaf) is not np.ndarray and isinstance(leaf, jax.Array)


def _with_new_axis(rows: Sequence[Any], aval: Any, axis: int) -> dict[int, Any]:
    """Rows by id, with a new axis of size 1, where they are: on host or devices."""
    parts = {id(row): row for row in rows}
    for key, row in parts.items():
        if _is_on_devices(row):
            parts[key] = jnp.expand_dims(row, axis)
        else:  # A scalar or array-like, of the dtype that it has on devices.
            array = np.asarray(row, aval.dtype)
            parts[key] = array[(*[slice(None)] * axis, None)]
    return parts
