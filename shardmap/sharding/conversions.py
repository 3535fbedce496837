"""The layouts of JAX's and XLA's shardings: `NamedSharding`, `HloSharding`, protos.

A `Layout` has the shape of a mesh of devices, and for each dimension of the array the
mesh dimensions that shard it, major to minor.

A `NamedSharding` names mesh dimensions. XLA has a *tile assignment* instead:
an array of device numbers with one dimension for each array dimension, and a last one
for copies. It is a transposition: number the devices row-major over the mesh (an iota),
transpose the mesh dimensions into the order of the array's dimensions, copies last, and
reshape. The iota form of the proto stores these steps, so its size does not depend on
the number of devices.

The way back finds, for each mesh dimension, the step of the *tile number* along it
(tiles are counted row-major; the step is 0 for copies). A layout exists if the tile
number of each device is the sum of such steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from shardmap._jax.protos import HloSharding, OpSharding
from shardmap._jax.types import Value
from shardmap.units import shown

Layout: TypeAlias = tuple[Sequence[int], Sequence[Sequence[int]]]
"""`ShardingSpec.mesh_shape` and `ShardingSpec.dim_shardings`."""

NO_SPEC = (
    "the devices are in an order that no ShardingSpec expresses: it is no "
    "transposition of a mesh"
)


# Shardings whose mesh dimensions have names


def cut_spec(dims: Mapping[int, Sequence[Any]]) -> PartitionSpec:
    """The `PartitionSpec` that shards these dimensions over these mesh axes.

    >>> cut_spec({1: ("x",), 2: ("y", "z"), 3: ()})
    P(None, 'x', ('y', 'z'), None)
    """
    entries: list[Any] = [None] * (max(dims, default=-1) + 1)
    for dimension, names in dims.items():
        entries[dimension] = names[0] if len(names) == 1 else tuple(names) or None
    return PartitionSpec(*entries)


def axes_in(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in an entry of a `PartitionSpec`, major to minor."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def from_named_sharding(sharding: NamedSharding, ndim: int) -> Layout:
    """See `ShardingSpec.from_named_sharding`."""
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"expected a NamedSharding, got {shown(sharding)}")
    mesh, pspec = sharding.mesh, sharding.spec
    partitions = pspec.partitions
    if len(partitions) > ndim:
        raise ValueError(
            f"{pspec} has {len(partitions)} entries, but the array has only "
            f"{ndim} dimensions"
        )
    if (
        PartitionSpec.UNCONSTRAINED in partitions
        or pspec.unreduced
        or AxisType.Manual in mesh.axis_types
    ):
        raise ValueError(
            f"no ShardingSpec expresses {pspec} over {mesh}: it can say neither "
            "UNCONSTRAINED, nor unreduced or Manual axes. Name mesh axes, or None"
        )
    dim_shardings = [
        [mesh.axis_names.index(name) for name in axes_in(entry)]
        for entry in (*partitions, *(None,) * (ndim - len(partitions)))
    ]
    return tuple(mesh.shape.values()), dim_shardings


# Any sharding of JAX's, by what each device holds


def sharding_of(array: Value) -> Sharding:
    """The sharding of a `jax.Array`, or of a description of one."""
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"spec_of needs an array with values, got the tracer {array}: where it "
            "lies is only known once the program is compiled"
        )
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"spec_of needs an array, got {shown(array)} of type "
            f"{type(array).__name__}, which has no sharding"
        )
    return sharding


def from_sharding(sharding: Sharding, shape: Sequence[int]) -> Layout:
    """See `ShardingSpec.from_sharding`."""
    if isinstance(sharding, NamedSharding):
        return from_named_sharding(sharding, len(shape))
    if not isinstance(sharding, Sharding):
        raise TypeError(f"expected a jax.sharding.Sharding, got {shown(sharding)}")
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
    return _layout_of_tiles(tile_counts, tiles)


# Tiles


def from_proto(
    proto: OpSharding | HloSharding, ndim: int | None, num_devices: int | None
) -> Layout:
    """See `ShardingSpec.from_proto`."""
    if isinstance(proto, HloSharding):
        proto = proto.to_proto()
    if not isinstance(proto, OpSharding):
        raise TypeError(
            f"expected an OpSharding proto or an HloSharding, got {shown(proto)}"
        )
    if proto.type == OpSharding.Type.REPLICATED:
        if ndim is None or num_devices is None:
            raise ValueError(
                "a REPLICATED proto holds neither rank nor devices: pass ndim (got "
                f"{ndim}) and num_devices (got {num_devices})"
            )
        return () if num_devices == 1 else (num_devices,), ((),) * ndim
    if proto.type != OpSharding.Type.OTHER:
        raise ValueError(
            f"no ShardingSpec expresses a proto of type {proto.type.name}: it can say "
            "REPLICATED and OTHER (tiles)"
        )
    tile_counts, copies_per_tile = _tiles_of(proto)
    devices = math.prod(tile_counts) * copies_per_tile
    for what, given, held in (
        ("ndim", ndim, len(tile_counts)),
        ("num_devices", num_devices, devices),
    ):
        if given is not None and given != held:
            raise ValueError(f"{what} is {given}, but the proto is for {held}")
    if proto.tile_assignment_devices:
        tiles = _tile_of_each_device(proto.tile_assignment_devices, copies_per_tile)
        return _layout_of_tiles(tile_counts, tiles)
    return _layout_of_steps(tile_counts, _mesh_of_iota(proto, copies_per_tile))


def _tiles_of(proto: OpSharding) -> tuple[tuple[int, ...], int]:
    """The number of tiles per array dimension, and how many devices hold each tile."""
    kinds = list(proto.last_tile_dims)
    for kind in kinds:
        if kind != OpSharding.Type.REPLICATED:
            raise ValueError(
                "no ShardingSpec expresses a proto with a last tile dimension of type "
                f"{OpSharding.Type(kind).name}: it can say REPLICATED"
            )
    sizes = tuple(proto.tile_assignment_dimensions)
    rank = len(sizes) - (len(kinds) or int(proto.replicate_on_last_tile_dim))
    listed = len(proto.tile_assignment_devices) or math.prod(proto.iota_reshape_dims)
    if rank < 0 or not sizes or math.prod(sizes) != listed:
        raise ValueError(
            f"the proto is malformed: its tile dimensions {list(sizes)} have "
            f"{math.prod(sizes)} entries, but it gives {listed} devices"
        )
    return sizes[:rank], math.prod(sizes[rank:])


def _tile_of_each_device(devices: Sequence[int], copies: int) -> np.ndarray:
    """Turns "which devices hold tile t" into "which tile does device k hold"."""
    numbers = np.asarray(devices)
    if not np.array_equal(np.sort(numbers), np.arange(numbers.size)):
        raise ValueError(
            f"the proto must list the devices 0 to {numbers.size - 1} once each, got "
            f"{numbers.tolist()}"
        )
    tiles = np.empty_like(numbers)
    tiles[numbers] = np.arange(numbers.size) // copies
    return tiles


class _MeshDimension(NamedTuple):
    """One step along this mesh dimension is `step` tiles further; 0 is a copy."""

    size: int
    step: int


def _mesh_of_iota(proto: OpSharding, copies: int) -> list[_MeshDimension]:
    """The mesh dimensions of the iota form, computed without making the iota."""
    sizes, order = proto.iota_reshape_dims, proto.iota_transpose_perm
    steps, step = {}, 1
    for dimension in reversed(order):
        steps[dimension] = step
        step *= sizes[dimension]
    mesh = [_MeshDimension(size, steps[d]) for d, size in enumerate(sizes)]
    # These steps count devices in tile order, `copies` of them to one tile.
    return [_MeshDimension(size, step // copies) for size, step in _split(mesh, copies)]


def _layout_of_tiles(tile_counts: Sequence[int], tiles: np.ndarray) -> Layout:
    """The layout under which device k holds tile `tiles[k]`.

    Tiles are numbered row-major over `tile_counts`. Mesh dimensions are found from the
    last: as long as one more device is the same number of tiles further, it is the same
    mesh dimension.

    Raises:
      ValueError: no spec expresses this.
    """
    mesh: list[_MeshDimension] = []
    rest = tiles
    while rest.size > 1:
        step = int(rest[1])
        differs = np.flatnonzero(rest != step * np.arange(rest.size))
        size = int(differs[0]) if differs.size else rest.size
        if not size:  # Device 0 does not hold tile 0.
            raise ValueError(NO_SPEC)
        mesh.insert(0, _MeshDimension(size, step))
        rest = rest[::size]
    expected = np.zeros((), dtype=int)
    for size, step in mesh:
        expected = np.add.outer(expected, step * np.arange(size))
    if not np.array_equal(expected.reshape(-1), tiles):
        raise ValueError(NO_SPEC)
    return _layout_of_steps(tile_counts, mesh)


def _split(mesh: Sequence[_MeshDimension], boundary: int) -> list[_MeshDimension]:
    """Splits the mesh dimension that crosses `boundary` tiles into two."""
    result = []
    for size, step in mesh:
        if step < boundary < size * step:
            if boundary % step:
                raise ValueError(NO_SPEC)
            # If `boundary` does not divide the rest, `_layout_of_steps` misses tiles.
            result.append(_MeshDimension(size * step // boundary, boundary))
            size = boundary // step
        result.append(_MeshDimension(size, step))
    return result


def _layout_of_steps(
    tile_counts: Sequence[int], mesh: Sequence[_MeshDimension]
) -> Layout:
    """The layout whose mesh dimensions have these steps."""
    # A mesh dimension may run over several array dimensions; cut it where one ends.
    place = 1
    for count in reversed(tile_counts):
        place *= count
        mesh = _split(mesh, place)
    mesh = [dimension for dimension in mesh if dimension.size > 1]
    # The steps must be the places of a number system that counts all the tiles: each
    # mesh dimension ends where the next larger step begins.
    major_to_minor = sorted(
        (d for d, (_, step) in enumerate(mesh) if step), key=lambda d: -mesh[d].step
    )
    ends = [place, *(mesh[d].step for d in major_to_minor)]
    if ends != [*(mesh[d].size * mesh[d].step for d in major_to_minor), 1]:
        raise ValueError(NO_SPEC)
    dim_shardings = []
    for count in tile_counts:
        end, place = place, place // count
        dim_shardings.append([d for d in major_to_minor if place <= mesh[d].step < end])
    return [size for size, _ in mesh], dim_shardings
