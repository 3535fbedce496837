"""The meshes that a jaxpr names."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.types import Jaxpr
from shardmap._jax.walk import equations


def meshes_of(jaxpr: Jaxpr) -> list[Any]:
    """The meshes that a program's equations name, the largest first."""
    named = (equation.params.get("mesh") for equation in equations(jaxpr))
    found = [
        mesh
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
