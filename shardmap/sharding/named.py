"""A sharding in JAX's words: `NamedSharding`, there and back, and the spec of an array.

A `NamedSharding` says the same as a `ShardingSpec` over given devices: mesh axes that
its `PartitionSpec` names are sharded axes, the others hold copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from shardmap.sharding.entries import Chunked, Replicated, ShardedAxis
from shardmap.sharding.proto import dimension_axes, mesh_axis_names, spec_of_tiles
from shardmap.sharding.spec import ShardingSpec


def named_sharding(
    spec: ShardingSpec,
    devices: Sequence[jax.Device] | np.ndarray,
    axis_names: Sequence[str] | None = None,
) -> NamedSharding:
    """See `ShardingSpec.named_sharding`."""
    spec.check_stacked("NamedSharding")
    flat = np.asarray(devices, dtype=object).reshape(-1)
    if flat.size != spec.num_shards:
        raise ValueError(
            f"{spec!r} needs {spec.num_shards} devices (a mesh of shape "
            f"{spec.mesh_shape}), got {flat.size}"
        )
    names = mesh_axis_names(spec, axis_names)
    partitions = [
        axes[0] if axes and len(axes) == 1 else axes
        for axes in dimension_axes(spec, names)
    ]
    mesh = Mesh(flat.reshape(spec.mesh_shape), names)
    return NamedSharding(mesh, PartitionSpec(*partitions))


def from_named_sharding(sharding: NamedSharding, ndim: int) -> ShardingSpec:
    """See `ShardingSpec.from_named_sharding`."""
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"expected a NamedSharding, got {sharding!r}")
    mesh, pspec = sharding.mesh, sharding.spec
    partitions = pspec.partitions
    if len(partitions) > ndim:
        raise ValueError(
            f"{pspec} has {len(partitions)} entries, but the array has only "
            f"{ndim} dimensions"
        )
    if PartitionSpec.UNCONSTRAINED in partitions:
        raise ValueError(
            f"no ShardingSpec expresses {pspec}: an UNCONSTRAINED dimension is "
            "left to the compiler. Name its mesh axes, or None"
        )
    if pspec.unreduced:
        raise ValueError(
            f"no ShardingSpec expresses {pspec}: its devices hold terms of a sum, "
            "which is still to be reduced"
        )
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(
            f"no ShardingSpec expresses a sharding over {mesh}: it has MANUAL axes"
        )
    sharding_entries: list[Chunked | None] = []
    axis_number: dict[Any, int] = {}
    for entry in (*partitions, *(None,) * (ndim - len(partitions))):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for name in names:
            axis_number[name] = len(axis_number)
        chunks = [mesh.shape[name] for name in names]
        sharding_entries.append(Chunked(chunks) if chunks else None)
    mapping = [
        ShardedAxis(axis_number[name]) if name in axis_number else Replicated(size)
        for name, size in mesh.shape.items()
    ]
    return ShardingSpec(sharding_entries, mapping)


def from_sharding(sharding: Sharding, shape: Sequence[int]) -> ShardingSpec:
    """See `ShardingSpec.from_sharding`."""
    if isinstance(sharding, NamedSharding):
        return from_named_sharding(sharding, len(shape))
    if not isinstance(sharding, Sharding):
        raise TypeError(f"expected a jax.sharding.Sharding, got {sharding!r}")
    held = list(sharding.devices_indices_map(tuple(shape)).values())
    tile_counts = []
    tiles = np.zeros(len(held), dtype=int)
    for dimension, size in enumerate(shape):
        ranges = [index[dimension].indices(size)[:2] for index in held]
        pieces = sorted(set(ranges))
        piece = size // len(pieces)
        if pieces != [(i * piece, (i + 1) * piece) for i in range(len(pieces))]:
            raise ValueError(
                f"no ShardingSpec expresses {sharding!r}: it cuts dimension "
                f"{dimension} of size {size} into unequal pieces {pieces}"
            )
        tile_counts.append(len(pieces))
        tiles = tiles * len(pieces) + [pieces.index(r) for r in ranges]
    return spec_of_tiles(tile_counts, tiles)


def spec_of(array: Any) -> ShardingSpec:
    """The spec of an array: which device holds which part of it.

    Args:
      array: a `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, or a NumPy array,
        which counts as lying whole on one device.

    Raises:
      TypeError: `array` has no known sharding, as a tracer has none.
      ValueError: no spec expresses its sharding.

    >>> spec_of(np.zeros((4, 8)))
    ShardingSpec((None, None), ())
    """
    if isinstance(array, np.ndarray | np.generic):
        return ShardingSpec((None,) * array.ndim, ())
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"spec_of needs an array with values, got the tracer {array}: where it "
            "lies is only known once the program is compiled"
        )
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"spec_of needs an array, got {array!r} of type {type(array).__name__}, "
            "which has no sharding"
        )
    return from_sharding(sharding, array.shape)


def pmap_sharding(
    shape: Sequence[int],
    sharded_dim: int | None = 0,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
) -> NamedSharding:
    """The layout `jax.pmap` gives an array: one dimension, one index per device.

    What `jax.sharding.PmapSharding.default` gave up to JAX 0.9, as a NamedSharding: the
    dimension stays, cut into pieces of length 1.

    Args:
      shape: the shape of the array.
      sharded_dim: the dimension that is spread over the devices; negative counts from
        the end. None: every device holds the whole array.
      devices: as many devices as the dimension is long. By default the first of
        `jax.local_devices()`, with `sharded_dim=None` all of them.

    Raises:
      ValueError: `sharded_dim` is out of range, or the number of devices is not the
        size of the dimension.

    >>> pmap_sharding((1, 5)).shard_shape((1, 5))
    (1, 5)
    """
    shape = tuple(shape)
    if devices is not None:
        devices = np.asarray(devices, dtype=object).reshape(-1)
    if sharded_dim is None:
        devices = jax.local_devices() if devices is None else devices
        copied = ShardingSpec((None,) * len(shape), (Replicated(len(devices)),))
        return copied.named_sharding(devices)
    if not -len(shape) <= sharded_dim < len(shape):
        raise ValueError(
            f"sharded_dim {sharded_dim} is out of range for shape {shape} of "
            f"{len(shape)} dimensions"
        )
    size = shape[sharded_dim]
    if devices is None:
        devices = jax.local_devices()[:size]
    if len(devices) != size:
        raise ValueError(
            f"dimension {sharded_dim} of shape {shape} has size {size} and needs one "
            f"device per index, got {len(devices)} devices. Cut it into longer pieces "
            "with a ShardingSpec and Chunked, or pass as many devices"
        )
    entries: list[Chunked | None] = [None] * len(shape)
    entries[sharded_dim] = Chunked(size)
    return ShardingSpec(entries, (ShardedAxis(0),)).named_sharding(devices)
