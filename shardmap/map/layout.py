"""Where the elements of a mapped axis go: devices and the mesh they form."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap.map.primitive import spmap_p
from shardmap.map.tracing import UNNAMED


def map_mesh(
    axis_name: Hashable,
    axis_size: int,
    call_jaxpr: Any,
    devices: Sequence[jax.Device],
) -> Mesh:
    """The mesh of an outermost map: its own axis, then one for each level inside.

    A level gets a mesh axis as long as the devices last; below that, maps are
    vectorised on each device.

    Args:
      axis_name: the map's axis name, also the mesh's if it is a string.
      axis_size: the number of elements.
      call_jaxpr: what is searched for maps inside.
      devices: the devices to use, at least ``axis_size``.
    """
    names, sizes = [axis_name], [axis_size]
    level = inner_maps(call_jaxpr)
    while level:
        size = max(equation.params["axis_size"] for equation in level)
        if size * np.prod(sizes) > len(devices):
            break
        inner_names = {equation.params["axis_name"] for equation in level}
        names.append(inner_names.pop() if len(inner_names) == 1 else None)
        sizes.append(size)
        level = [
            inner
            for equation in level
            for inner in inner_maps(equation.params["call_jaxpr"])
        ]
    grid = np.asarray(devices[: int(np.prod(sizes))], dtype=object).reshape(sizes)
    return Mesh(grid, _mesh_axis_names(names))


def _mesh_axis_names(names: Sequence[Hashable]) -> tuple[str, ...]:
    """Strings, as the partitioner wants, all different."""
    chosen: list[str] = []
    for level, name in enumerate(names):
        if not isinstance(name, str) or name == UNNAMED or name in chosen:
            name = f"axis{level}"
        chosen.append(name)
    return tuple(chosen)


def inner_maps(jaxpr: Any) -> list[Any]:
    """The map equations one level down, in whatever other equations hold them."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is spmap_p:
            found.append(equation)
        else:
            for inner in jex_core.jaxprs_in_params(equation.params):
                found.extend(inner_maps(inner))
    return found


def partition_spec(mesh_axis: str, axis: int | None) -> PartitionSpec:
    """The spec of an array whose dimension ``axis`` is the mapped axis."""
    if axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, mesh_axis)


def map_shardings(mesh: Mesh, axes: Sequence[int | None]) -> tuple[NamedSharding, ...]:
    """How operands or results lie on the mesh of an outermost map."""
    return tuple(
        NamedSharding(mesh, partition_spec(mesh.axis_names[0], axis)) for axis in axes
    )
