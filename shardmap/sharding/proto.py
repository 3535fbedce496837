"""A sharding in XLA's words: `HloSharding`, `OpSharding` protos and Shardy text.

XLA says a layout the other way round from `ShardingSpec`: an array of *tiles*, one
dimension per array dimension and a last one for copies, whose entries are device
numbers. The way there is a transposition: number the devices row-major over the mesh
(an iota), move the mesh dimensions into the order of the array's dimensions, copies
last, and reshape. The iota form of the proto stores just that recipe, so its size does
not depend on the number of devices. JAX 0.4 did the same with lists of devices.

The way back asks, for each mesh dimension, what one step along it does to the *tile
number* (tiles counted row-major). A layout is a spec just when device numbers are such
steps added up: each mesh dimension has a size and a step, 0 for copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxlib.xla_client import HloSharding, OpSharding

from shardmap.sharding.entries import Chunked, Replicated, ShardedAxis
from shardmap.sharding.model import SpecModel, SpecParts

NO_SPEC = (
    "the devices are in an order that no ShardingSpec expresses: it is no "
    "transposition of a mesh"
)


class _MeshDimension(NamedTuple):
    """One step along this mesh dimension is `step` tiles further; 0 is a copy."""

    size: int
    step: int


def hlo_sharding(spec: SpecModel) -> HloSharding:
    """See `ShardingSpec.hlo_sharding`."""
    spec.check_stacked("proto")
    if math.prod(spec.tile_counts) == 1:
        return HloSharding.replicate()
    order, copies = _tile_order(spec)
    last_tile_dims = [OpSharding.Type.REPLICATED] if copies > 1 else []
    return HloSharding.iota_tile(
        (*spec.tile_counts, copies) if copies > 1 else spec.tile_counts,
        reshape_dims=spec.mesh_shape,
        transpose_perm=order,
        subgroup_types=last_tile_dims,
    )


def listed_proto(spec: SpecModel) -> OpSharding:
    """See `ShardingSpec.sharding_proto`: the form that lists the devices."""
    spec.check_stacked("proto")
    proto = OpSharding()
    if not spec.sharded_axis_sizes:
        proto.type = OpSharding.Type.REPLICATED
        return proto
    order, copies = _tile_order(spec)
    devices = np.arange(spec.num_shards).reshape(spec.mesh_shape).transpose(order)
    is_copied = len(spec.mesh_mapping) > len(spec.sharded_axis_sizes)
    proto.type = OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [*spec.tile_counts, *[copies] * is_copied]
    proto.tile_assignment_devices = devices.reshape(-1).tolist()
    proto.replicate_on_last_tile_dim = is_copied
    return proto


def _tile_order(spec: SpecModel) -> tuple[list[int], int]:
    """The mesh dimensions in the order of the array's, copies last; and how many."""
    walks = {
        assignment.axis: dimension
        for dimension, assignment in enumerate(spec.mesh_mapping)
        if isinstance(assignment, ShardedAxis)
    }
    copied = [d for d in range(len(spec.mesh_mapping)) if d not in walks.values()]
    copies = math.prod(spec.mesh_shape[d] for d in copied)
    return [walks[axis] for axis in sorted(walks)] + copied, copies


def mesh_axis_names(
    spec: SpecModel, axis_names: Sequence[str] | None
) -> tuple[str, ...]:
    """A name per mesh dimension of `spec`: the names given, or "axis0", "axis1", ..."""
    count = len(spec.mesh_mapping)
    if axis_names is None:
        return tuple(f"axis{dimension}" for dimension in range(count))
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"axis_names must be {count} different names, one per mesh dimension of "
            f"{spec!r}, got {len(names)}: {names}"
        )
    return names


def dimension_axes(
    spec: SpecModel, names: tuple[str, ...]
) -> list[tuple[str, ...] | None]:
    """For each array dimension, the mesh axes that cut it, major to minor."""
    name_of_axis = {
        assignment.axis: name
        for assignment, name in zip(spec.mesh_mapping, names, strict=True)
        if isinstance(assignment, ShardedAxis)
    }
    in_order = iter(name_of_axis[axis] for axis in sorted(name_of_axis))
    return [
        tuple(next(in_order) for _ in entry.chunks)
        if isinstance(entry, Chunked)
        else None
        for entry in spec.sharding
    ]


def sdy(spec: SpecModel, axis_names: Sequence[str] | None) -> str:
    """See `ShardingSpec.sdy`."""
    spec.check_stacked("Shardy text")
    names = mesh_axis_names(spec, axis_names)
    # A mesh without dimensions is called so when JAX lowers it.
    mesh = "@mesh" if names else "@empty_mesh"
    sizes = ", ".join(
        f'"{name}"={size}' for name, size in zip(names, spec.mesh_shape, strict=True)
    )
    cuts = ", ".join(
        "{" + ", ".join(f'"{name}"' for name in axes or ()) + "}"
        for axes in dimension_axes(spec, names)
    )
    return f"sdy.mesh {mesh} = <[{sizes}]>\n#sdy.sharding<{mesh}, [{cuts}]>"


def from_proto(
    proto: OpSharding | HloSharding, ndim: int | None, num_devices: int | None
) -> SpecParts:
    """See `ShardingSpec.from_proto`."""
    if isinstance(proto, HloSharding):
        proto = proto.to_proto()
    if not isinstance(proto, OpSharding):
        raise TypeError(
            f"expected an OpSharding proto or an HloSharding, got {proto!r}"
        )
    if proto.type == OpSharding.Type.REPLICATED:
        if ndim is None or num_devices is None:
            raise ValueError(
                "a REPLICATED proto holds neither rank nor devices: pass ndim (got "
                f"{ndim}) and num_devices (got {num_devices})"
            )
        copies = () if num_devices == 1 else (Replicated(num_devices),)
        return (None,) * ndim, copies
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
        return parts_of_tiles(tile_counts, tiles)
    return _parts_of_mesh(tile_counts, _mesh_of_iota(proto, copies_per_tile))


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


def _mesh_of_iota(proto: OpSharding, copies: int) -> list[_MeshDimension]:
    """The mesh dimensions of the iota form, read off without making the iota."""
    sizes, order = proto.iota_reshape_dims, proto.iota_transpose_perm
    steps, step = {}, 1
    for dimension in reversed(order):
        steps[dimension] = step
        step *= sizes[dimension]
    mesh = [_MeshDimension(size, steps[d]) for d, size in enumerate(sizes)]
    # These steps count devices in tile order, `copies` of them to one tile.
    return [_MeshDimension(size, step // copies) for size, step in _split(mesh, copies)]


def parts_of_tiles(tile_counts: Sequence[int], tiles: np.ndarray) -> SpecParts:
    """The spec under which device k holds tile `tiles[k]`.

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
    return _parts_of_mesh(tile_counts, mesh)


def _split(mesh: Sequence[_MeshDimension], boundary: int) -> list[_MeshDimension]:
    """Cuts the mesh dimension that steps across `boundary` tiles into two at it."""
    result = []
    for size, step in mesh:
        if step < boundary < size * step:
            if boundary % step:
                raise ValueError(NO_SPEC)
            # If `boundary` does not divide the rest, `_parts_of_mesh` misses tiles.
            result.append(_MeshDimension(size * step // boundary, boundary))
            size = boundary // step
        result.append(_MeshDimension(size, step))
    return result


def _parts_of_mesh(
    tile_counts: Sequence[int], mesh: Sequence[_MeshDimension]
) -> SpecParts:
    """The spec whose mesh dimensions take these steps through the tiles."""
    # A mesh dimension may run over several array dimensions; cut it where one ends.
    place = 1
    for count in reversed(tile_counts):
        place *= count
        mesh = _split(mesh, place)
    mesh = [dimension for dimension in mesh if dimension.size > 1]
    # The steps must be the places of a number system that counts all the tiles: each
    # mesh dimension ends where the next larger step begins.
    major_to_minor = sorted((d for d in mesh if d.step), key=lambda d: -d.step)
    ends = [place, *(d.step for d in major_to_minor)]
    if ends != [*(d.size * d.step for d in major_to_minor), 1]:
        raise ValueError(NO_SPEC)
    sharding = []
    for count in tile_counts:
        end, place = place, place // count
        chunks = [d.size for d in major_to_minor if place <= d.step < end]
        sharding.append(Chunked(chunks) if chunks else None)
    axis_of_step = {d.step: axis for axis, d in enumerate(major_to_minor)}
    mapping = [
        ShardedAxis(axis_of_step[step]) if step else Replicated(size)
        for size, step in mesh
    ]
    return sharding, mapping
