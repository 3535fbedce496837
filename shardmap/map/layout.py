"""Where the elements of a mapped axis go: devices, blocks on each, and shardings.

An outermost map makes a mesh, or is given one. In a mesh that it makes, the first axis
is its own, and there is one axis for each level of maps inside it. Behind them are the
axes for the partitions of `sharded_jit`.

A map that is called outside of any program takes as many devices as it needs. In a
program with other operations its mesh has all devices. The devices that it does not
need have no elements, or replicate those of others along the last mesh axis.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax.stages import is_compile_only
from shardmap._jax.types import AnyMesh, Equation, Jaxpr, aval_of
from shardmap._jax.walk import equations, equations_with, primitives_in
from shardmap.arrays import placement, processes
from shardmap.map.constraint import axes_in_map, constrain_p, partition_dims
from shardmap.map.primitives.axis import REPLICAS, UNNAMED
from shardmap.map.primitives.map_primitive import MapParams, spmap_p
from shardmap.map.propagation import DimToMeshAxes, propagate
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.mesh import is_mesh_axis_name


def devices_for(axis_size: int, available: int) -> int:
    """The number of devices of an axis: the fewest with the smallest blocks."""
    axis_size = max(axis_size, 1)
    return -(-axis_size // -(-axis_size // available))


def _all_devices_for(axis_size: int, available: int) -> int:
    """`devices_for` if that divides the available devices, else all of them.

    What is left over are replicas, which must be equally many for each device.
    """
    needed = devices_for(axis_size, available)
    return available if available % needed else needed


def _divisor_for(axis_size: int, available: int) -> int:
    """The most devices that divide ``available`` and all get elements."""
    return max(
        n
        for n in range(1, available + 1)
        if available % n == 0 and devices_for(axis_size, n) == n
    )


def _even_devices_for(axis_size: int, available: int) -> int:
    """The most devices that have equal blocks of the axis."""
    return max(n for n in range(1, available + 1) if axis_size % n == 0)


DeviceCount = Callable[[int, int], int]
"""How many devices an axis is on, from its size and the number of devices."""


def map_mesh(
    axis_name: Hashable,
    axis_size: int,
    call_jaxpr: Jaxpr,
    devices: Sequence[jax.Device],
    use_all_devices: bool,
) -> tuple[Mesh, tuple[str, ...], tuple[str, ...]]:
    """The mesh that an outermost map makes, its axes there, and those of maps inside.

    Axes for partitions take their devices first. A level of nesting gets a mesh axis as
    long as there are devices left; below that, maps are vectorised on each device. Over
    several processes each has an equal part of the elements, in equal blocks on its
    devices.

    A part of a program uses all devices, as JAX describes all results on the first mesh
    of a program. Else spare devices are not in the mesh; nor if the number of
    partitions inside does not divide.
    """
    groups = processes.by_process(devices)
    if is_compile_only(devices[0]) and axis_size % len(devices):
        # All elements are passed here, and libtpu has to have the first chips.
        groups = [sorted(devices, key=lambda device: device.id)]
    if axis_size % len(groups) == 0:
        # Each process lays its own elements on its own devices.
        axis_size //= len(groups)
    else:
        groups = [list(devices)]
    available = len(groups[0])
    partitions: dict[str, int] = {}
    if constraints := equations_with(call_jaxpr, constrain_p):
        partitions = axes_in_map(constraints, axis_name, axis_size, available)
    count, rest = divmod(available, math.prod(partitions.values()))
    outer: DeviceCount = _even_devices_for if len(groups) > 1 else devices_for
    sizes, names = _level_sizes(axis_size, call_jaxpr, count, outer, devices_for)
    has_replicas = use_all_devices and not rest and math.prod(sizes) < count
    is_flat = len(sizes) == len(groups) == 1 and not partitions
    if has_replicas and is_flat:
        sizes = [count]  # XLA can combine this mesh with any other.
    elif has_replicas:
        outer = math.gcd if len(groups) > 1 else _all_devices_for
        sizes, names = _level_sizes(axis_size, call_jaxpr, count, outer, _divisor_for)
    inside = {
        equation.params["axis_name"] for equation in equations_with(call_jaxpr, spmap_p)
    }
    levels = _mesh_axis_names([axis_name, *names], {axis_name} | inside)
    axes = dict(zip(levels, sizes, strict=True)) | partitions
    if has_replicas:
        axes[REPLICAS] = count // math.prod(sizes)
    per_group = math.prod(axes.values())
    used = [device for group in groups for device in group[:per_group]]
    axes[levels[0]] *= len(groups)
    grid = np.asarray(used, dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes)), levels[:1], levels[1:]


def _level_sizes(
    axis_size: int,
    jaxpr: Jaxpr,
    count: int,
    outer: DeviceCount,
    inner: DeviceCount,
) -> tuple[list[int], list[Hashable]]:
    """The number of devices of each level of nesting, and the inner levels' names."""
    sizes = [outer(axis_size, count)]
    names: list[Hashable] = []
    level = inner_maps(jaxpr)
    while level:
        left = count // math.prod(sizes)
        size = max(inner(each.axis_size, left) for each in level)
        if size == 1:
            break
        inner_names = {each.axis_name for each in level}
        names.append(inner_names.pop() if len(inner_names) == 1 else None)
        sizes.append(size)
        level = [deeper for each in level for deeper in inner_maps(each.call_jaxpr)]
    return sizes, names


def _mesh_axis_names(
    names: Sequence[Hashable], taken: set[Hashable]
) -> tuple[str, ...]:
    """Different strings that XLA can read: the maps' names where they are such.

    Other names are ones that no map has, as the collectives of a map could mean them.
    """
    chosen: list[str] = []
    for level, name in enumerate(names):
        if not is_mesh_axis_name(name) or name == UNNAMED or name in chosen:
            numbered = (f"axis{k}" for k in itertools.count(level))
            name = next(n for n in numbered if n not in taken and n not in chosen)
        chosen.append(name)
    return tuple(chosen)


def inner_maps(jaxpr: Jaxpr) -> list[MapParams]:
    """The maps one level down, in control flow and calls too."""
    if spmap_p not in primitives_in(jaxpr):
        return []
    outside = equations(jaxpr, into=lambda equation: equation.primitive is not spmap_p)
    return [MapParams.of(each) for each in outside if each.primitive is spmap_p]


def lay_out_inner(
    params: MapParams, mesh: AnyMesh, inner_axes: Sequence[str]
) -> MapParams:
    """A map inside another, on its mesh; without mesh axes, each device vectorises it.

    ``inner_axes`` are left for maps that name none.
    """
    if params.mesh_axes is not None:
        return params.on(mesh, params.mesh_axes, tuple(inner_axes))
    if inner_axes:
        devices = mesh.shape[inner_axes[0]]
        if devices_for(params.axis_size, devices) == devices:
            return params.on(mesh, (inner_axes[0],), tuple(inner_axes[1:]))
    return params.on(mesh)


# The shardings of operands and results


class MapShardings(NamedTuple):
    """The shardings of an outermost map's operands and results."""

    operands: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]


def map_shardings(params: MapParams) -> MapShardings:
    """The shardings of a map on a mesh, including those of maps inside.

    An operand that a map inside takes as it is, or a result of one, is cut along that
    map's mesh axes too, and likewise for partitions. A dimension that does not divide
    among its devices is replicated, as JAX has no uneven shards.
    """
    mesh, jaxpr = cast(AnyMesh, params.mesh), params.call_jaxpr
    operands, results = _map_dims(params)
    # XLA replicates results without entries.
    results = [
        dims if params.axis_size * aval_of(var).size else {}
        for var, dims in zip(jaxpr.outvars, results, strict=True)
    ]

    def sharding(dims: DimToMeshAxes, atom: Any) -> NamedSharding:
        return placement.array_sharding(mesh, cut_spec(dims), atom.aval)

    return MapShardings(
        tuple(map(sharding, operands, jaxpr.invars)),
        tuple(map(sharding, results, jaxpr.outvars)),
    )


def partition_spec(mesh_axes: tuple[str, ...], axis: int | None) -> PartitionSpec:
    """The spec of an array whose dimension ``axis`` is cut along ``mesh_axes``."""
    return cut_spec({} if axis is None else {axis: mesh_axes})


def _map_dims(params: MapParams) -> tuple[list[DimToMeshAxes], list[DimToMeshAxes]]:
    """The mesh axes of its operands' and results' dimensions, with maps inside."""
    along = params.mesh_axes if not params.axis.padding else ()

    def outside(axis: int | None, dims: DimToMeshAxes) -> DimToMeshAxes:
        if axis is None:
            return dims
        shifted = {dim + (dim >= axis): names for dim, names in dims.items()}
        return ({axis: along} if along else {}) | shifted

    operands, results = _element_dims(
        params.call_jaxpr, cast(AnyMesh, params.mesh), params.inner_axes
    )
    return (
        list(map(outside, params.in_axes, operands)),
        list(map(outside, params.out_axes, results)),
    )


def _element_dims(
    jaxpr: Jaxpr, mesh: AnyMesh, inner_axes: Sequence[str]
) -> tuple[list[DimToMeshAxes], list[DimToMeshAxes]]:
    """Those of inputs and outputs that maps and constraints cut."""
    if primitives_in(jaxpr).isdisjoint({spmap_p, constrain_p}):
        return [{}] * len(jaxpr.invars), [{}] * len(jaxpr.outvars)

    def dims_of(
        equation: Equation,
    ) -> tuple[Sequence[DimToMeshAxes], Sequence[DimToMeshAxes]] | None:
        if equation.primitive is spmap_p:
            return _map_dims(lay_out_inner(MapParams.of(equation), mesh, inner_axes))
        if equation.primitive is constrain_p:
            dims = [partition_dims(equation.params["parts"], mesh)]
            return dims, dims
        return None

    return propagate(jaxpr, dims_of)
