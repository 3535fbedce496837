"""The meshes that a jaxpr names, and what `jax.shard_map` does along their axes."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.collectives import named_axes
from shardmap._jax.types import Equation, Jaxpr, PyTree
from shardmap._jax.walk import equations
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.layout import MeshPlacement, inner_walk
from shardmap.map.primitives.axis import REPLICAS

_GIVE_ALL_THE_SAME = ("all-reduce", "all-gather")


def meshes_of(jaxpr: Jaxpr, args: PyTree = ()) -> list[Any]:
    """The meshes that a program's equations name, the largest first.

    These are the meshes of maps, and of constraints on how arrays are sharded. Where
    axes are explicit an equation names the abstract mesh of the one that is set, that
    its arguments are on, or that another equation names: it is that one.

    Args:
      jaxpr: the program.
      args: what it is called with.
    """
    named: list[Any] = []
    for equation in equations(jaxpr):
        constrained = equation.params.get("sharding")
        named.append(equation.params.get("mesh"))
        if isinstance(constrained, NamedSharding) and constrained.num_devices > 1:
            named += [constrained.mesh] if isinstance(constrained.mesh, Mesh) else []
    around = [*named, jax.sharding.get_mesh()]
    around += [
        leaf.sharding.mesh
        for leaf in jax.tree.leaves(args)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    here = {
        tuple(mesh.shape.items()): mesh for mesh in around if isinstance(mesh, Mesh)
    }
    found = [
        here.get(tuple(mesh.shape.items()), mesh)
        if isinstance(mesh, AbstractMesh)
        else mesh
        for mesh in named
        if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty
    ]
    return sorted(found, key=lambda mesh: -mesh.size)


def largest_mesh(meshes: Sequence[Any], layouts: Sequence[Any]) -> Any:
    """The one to speak of; None if there is none."""
    named = [s.mesh for s in layouts if isinstance(s, NamedSharding)]
    return max([*meshes, *named], key=lambda mesh: mesh.size, default=None)


def axes_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The names and sizes of the axes of a mesh; () without one."""
    sizes = {} if mesh is None else mesh.shape
    # A map without replicas of its elements has that axis nevertheless.
    return tuple(item for item in sizes.items() if item != (REPLICAS, 1))


def devices_of(mesh: Any) -> tuple[int, ...]:
    """The ids of the devices of a mesh, in its order; () if it has none."""
    if not isinstance(mesh, Mesh):
        return ()
    return tuple(device.id for device in mesh.devices.flat)


def if_unusual(devices: Sequence[int]) -> tuple[int, ...]:
    """The ids of devices; () for 0, 1, 2 and so on, which need not be said."""
    return () if [*devices] == [*range(len(devices))] else tuple(devices)


def device_of(layouts: Sequence[Any], meshes: Sequence[Any]) -> Any:
    for mesh in meshes:
        return mesh.devices.flat[0]
    for sharding in layouts:
        if isinstance(sharding, Sharding):
            return next(iter(sharding.device_set))
    return jax.local_devices()[0]


def tells_apart(shard_map: Equation, name: str) -> bool:
    """Whether devices along a mesh axis have, get or ask for something of their own."""
    specs = [spec.partitions for spec in shard_map.params["in_specs"]]
    return name in jax.tree.leaves(specs) or any(
        name in named_axes(each)
        for each in equations(shard_map.params["jaxpr"])
        if each.primitive in COLLECTIVES
        and COLLECTIVES[each.primitive].kind not in _GIVE_ALL_THE_SAME
    )


def map_place(
    equation: Equation, mesh: Any, inner_axes: tuple[str, ...]
) -> tuple[Any, MeshPlacement | None]:
    """The mesh of a map, and where on it the map goes; None: on each device whole.

    Args:
      equation: the map's.
      mesh: that of the outermost map around it, or None.
      inner_axes: the mesh axes left for maps inside.
    """
    params = equation.params
    if mesh is not None:
        return mesh, inner_walk(equation, mesh, inner_axes)
    if params["mesh"] is None:
        return None, None
    return params["mesh"], MeshPlacement(params["mesh_axes"], params["inner_axes"])
