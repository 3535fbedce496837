"""Putting arrays together: one shard for each device, with no stacked copy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from shardmap.map import array_likes, placement, processes
from shardmap.map.on_device import operand, program
from shardmap.sharding.named import pmap_sharding
from shardmap.sharding.spec import Replicated, ShardingSpec


def device_put_sharded(shards: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """Puts one shard on each device, and makes one array of them.

    The value is ``stack(shards)``, but no stack is made on the host: each shard goes to
    its device, where it gets the new leading axis. A shard that is there already does
    not leave it. As `jax.device_put_sharded` up to JAX 0.9.

    Args:
      shards: an array for each device, or a pytree of arrays for each device, of equal
        structure, shapes and dtypes.
      devices: as many different devices.

    Returns:
      An array of shape ``(len(devices), *shard.shape)``, or a pytree of such. Its
      sharding is a `jax.sharding.NamedSharding` over a mesh of one axis, in the order
      of ``devices``: what `pmap_sharding` gives, and what `spmap` takes without a copy.

    Raises:
      TypeError: ``shards`` is no sequence, or a shard has something that is no array.
      ValueError: there are no devices or too few or too many shards, a device is
        there twice or another process's, or shards differ.

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
    _check_devices("device_put_sharded", devices)
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
        )
    flat = [jax.tree.flatten(shard) for shard in shards]
    tree = flat[0][1]
    _check_structures(shards, [structure for _, structure in flat])
    _check_avals(shards, [leaves for leaves, _ in flat])
    return jax.tree.unflatten(tree, _stack([leaves for leaves, _ in flat], devices))


def device_put_replicated(x: Any, devices: Sequence[jax.Device]) -> Any:
    """Puts a copy of an array on each device, and makes one array of them.

    The value is ``stack([x] * len(devices))``, but no stack is made on the host. As
    `jax.device_put_replicated` up to JAX 0.9.

    Args:
      x: an array or a pytree of arrays.
      devices: different devices. If some are another process's, each process that has
        some calls this, with an equal ``x``.

    Returns:
      An array of shape ``(len(devices), *x.shape)``, or a pytree of such, laid out as
      `device_put_sharded` does.

    Raises:
      TypeError: ``x`` has something that is no array.
      ValueError: there are no devices, or one is there twice.

    Example:
      >>> y = device_put_replicated({"w": np.ones(2)}, jax.local_devices()[:1])
      >>> y["w"].shape
      (1, 2)
    """
    _check_devices("device_put_replicated", devices)
    if processes.several(devices):
        here = [d for d in devices if d in _sharding(devices).addressable_devices]
        part = device_put_replicated(x, here)
        return jax.tree.map(lambda rows: _as_part(rows, devices), part)
    leaves, tree = jax.tree.flatten(x)
    on_host = [k for k, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)]
    arrays = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    # A broadcast takes no memory, and JAX cuts each device's row from it as a view.
    rows = [_on_host(leaves[k])[None] for k in on_host]
    put = jax.device_put(
        [np.broadcast_to(row, (len(devices), *row.shape[1:])) for row in rows],
        _sharding(devices),
    )
    copies = [_copies(leaves[k], devices) for k in arrays]
    stacked = _stack(list(zip(*copies, strict=True)), devices)
    results = dict(zip([*on_host, *arrays], [*put, *stacked], strict=True))
    return jax.tree.unflatten(tree, [results[k] for k in range(len(leaves))])


def _as_part(rows: jax.Array, devices: Sequence[jax.Device]) -> jax.Array:
    """The array over all devices that a process's rows are a part of."""
    shards = [shard.data for shard in rows.addressable_shards]
    shape = (len(devices), *rows.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, _sharding(devices), shards)


def _copies(array: jax.Array, devices: Sequence[jax.Device]) -> Sequence[jax.Array]:
    """One copy for each device, on it."""
    if isinstance(array, jax.core.Tracer):
        return [array] * len(devices)
    sharding = ShardingSpec((), (Replicated(len(devices)),)).named_sharding(devices)
    (whole,) = placement.place([array], [sharding], uncommitted=True)
    held = {shard.device: shard.data for shard in whole.addressable_shards}
    return [held[device] for device in devices]


def _stack(
    rows: Sequence[Sequence[Any]], devices: Sequence[jax.Device]
) -> list[jax.Array]:
    """One array for each position in the rows; row ``k`` goes to device ``k``."""
    columns = list(zip(*rows, strict=True))
    # While a function is traced, arrays that are no tracers are put as ever.
    with jax.ensure_compile_time_eval():
        concrete = iter(_assemble([c for c in columns if not _traced(c)], devices))
    return [
        jnp.stack(column) if _traced(column) else next(concrete) for column in columns
    ]


def _traced(column: Sequence[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in column)


def _assemble(
    columns: Sequence[Sequence[Any]], devices: Sequence[jax.Device]
) -> list[jax.Array]:
    """As `_stack`, given the leaves of each position."""
    pieces = [list(row) for row in zip(*columns, strict=True)]
    on_host = [
        (r, c)
        for r, row in enumerate(pieces)
        for c, leaf in enumerate(row)
        if not isinstance(leaf, jax.Array)
    ]
    put = jax.device_put(
        [_on_host(pieces[r][c])[None] for r, c in on_host],
        [devices[r] for r, _ in on_host],
    )
    for row, device in zip(pieces, devices, strict=bool(pieces)):
        arrays = [c for c, leaf in enumerate(row) if isinstance(leaf, jax.Array)]
        for c, array in zip(
            arrays, _with_axis([row[c] for c in arrays], device), strict=True
        ):
            row[c] = array
    for (r, c), array in zip(on_host, put, strict=True):
        pieces[r][c] = array
    sharding = _sharding(devices)
    return [
        jax.make_array_from_single_device_arrays(
            (len(devices), *column[0].shape[1:]), sharding, list(column)
        )
        for column in zip(*pieces, strict=True)
    ]


def _with_axis(arrays: Sequence[jax.Array], device: jax.Device) -> list[jax.Array]:
    """The arrays on a device, with a new leading axis of size 1."""
    there = [SingleDeviceSharding(device)] * len(arrays)
    moved = placement.place(arrays, there, uncommitted=True)
    if not moved:
        return []
    return program(device, _expand, tuple(map(operand, moved)))(*moved)


def _expand(*arrays: Any) -> list[Any]:
    return [jax.lax.expand_dims(array, (0,)) for array in arrays]


def _on_host(leaf: Any) -> np.ndarray:
    """A scalar or array-like as NumPy array, of the dtype it has on devices."""
    return np.asarray(leaf, array_likes.abstract_value(leaf).dtype)


def _sharding(devices: Sequence[jax.Device]) -> Sharding:
    """The leading axis spread over the devices, for an array of any rank."""
    return pmap_sharding((len(devices),), 0, devices)


def _check_devices(caller: str, devices: Sequence[jax.Device]) -> None:
    if len(devices) == 0:
        raise ValueError(f"{caller} needs at least one device, got {devices!r}.")
    twice = sorted({d.id for d in devices if list(devices).count(d) > 1})
    if twice:
        raise ValueError(
            f"{caller} needs different devices, but device {twice[0]} is there more "
            f"than once in {[d.id for d in devices]}."
        )


def _check_structures(shards: Sequence[Any], trees: Sequence[Any]) -> None:
    for k, tree in enumerate(trees):
        if tree != trees[0]:
            first, other = _paths(shards[0]), _paths(shards[k])
            missing = [f"shards[0]{p} is not in shards[{k}]" for p in first - other]
            added = [f"shards[{k}]{p} is not in shards[0]" for p in other - first]
            raise ValueError(
                f"device_put_sharded needs shards of equal structure: shards[0] is "
                f"{trees[0]}, shards[{k}] is {tree}."
                + "".join(f"\n  * {line}" for line in sorted([*missing, *added]))
            )


def _paths(tree: Any) -> set[str]:
    return {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def _check_avals(shards: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    kinds = [[_kind(leaf) for leaf in row] for row in rows]
    bad = [
        (k, position)
        for k, row in enumerate(kinds)
        for position, kind in enumerate(row)
        if kind != kinds[0][position]
    ]
    if bad:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shards[0])]
        listed = "".join(
            f"\n  * shards[{k}]{jax.tree_util.keystr(paths[position])} is "
            f"{_short(kinds[k][position])}, but in shards[0] it is "
            f"{_short(kinds[0][position])}"
            for k, position in bad
        )
        raise ValueError(
            f"device_put_sharded needs shards of equal shapes and dtypes:{listed}"
        )


def _kind(leaf: Any) -> tuple[Any, tuple[int, ...]]:
    aval = array_likes.abstract_value(leaf)
    return aval.dtype, aval.shape


def _short(kind: tuple[Any, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{dtype}[{','.join(map(str, shape))}]"
