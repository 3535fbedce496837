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
from shardmap.sharding.mesh import check_devices
from shardmap.sharding.model import SpecModel, SpecParts
from shardmap.sharding.proto import dimension_axes, mesh_axis_names, parts_of_tiles


def named_sharding(
    spec: SpecModel,
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
    check_devices("named_sharding", flat)
    names = mesh_axis_names(spec, axis_names)
    partitions = [
        axes[0] if axes and len(axes) == 1 else axes
        for axes in dimension_axes(spec, names)
    ]
    mesh = Mesh(flat.reshape(spec.mesh_shape), names)
    return NamedSharding(mesh, PartitionSpec(*partitions))


def from_named_sharding(sharding: NamedSharding, ndim: int) -> SpecParts:
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
    return sharding_entries, mapping


def from_sharding(sharding: Sharding, shape: Sequence[int]) -> SpecParts:
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
        shards = sorted(set(ranges))
        shard = size // len(shards)
        if shards != [(i * shard, (i + 1) * shard) for i in range(len(shards))]:
            raise ValueError(
                f"no ShardingSpec expresses {sharding!r}: it cuts dimension "
                f"{dimension} of size {size} into unequal shards {shards}"
            )
        tile_counts.append(len(shards))
        tiles = tiles * len(shards) + [shards.index(r) for r in ranges]
    return parts_of_tiles(tile_counts, tiles)
