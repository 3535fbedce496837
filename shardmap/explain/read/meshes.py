"""The meshes that a jaxpr names."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.types import Jaxpr, PyTree
from shardmap._jax.walk import equations


def meshes_of(jaxpr: Jaxpr, args: PyTree = ()) -> list[Any]:
    """The meshes that a program's equations name, the largest first.

    These are the meshes of maps, and of constraints on how arrays are sharded. Where
    axes are explicit an equation names the abstract mesh of the one that is set, or
    that its arguments are on: it is that one.

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
    around = [jax.sharding.get_mesh()]
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


def axes_of_meshes(
    meshes: Sequence[Any], layouts: Sequence[Any]
) -> tuple[tuple[str, int], ...]:
    named = [s.mesh for s in layouts if isinstance(s, NamedSharding)]
    candidates = [*meshes, *named]
    if not candidates:
        return ()
    return tuple(max(candidates, key=lambda mesh: mesh.size).shape.items())


def device_of(layouts: Sequence[Any], meshes: Sequence[Any]) -> Any:
    for mesh in meshes:
        return mesh.devices.flat[0]
    for sharding in layouts:
        if isinstance(sharding, Sharding):
            return next(iter(sharding.device_set))
    return jax.local_devices()[0]
