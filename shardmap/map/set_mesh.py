"""Maps under `jax.set_mesh`.

A program under `jax.set_mesh` runs on the devices of that mesh, and so do the maps in
it. A map that is called there is compiled as by `jax.jit`, and its results are on that
mesh. A map that names other devices runs outside of the mesh.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import concrete_mesh, without_mesh
from shardmap._jax.types import PyTree, Value
from shardmap.arrays import array_likes, placement
from shardmap.map import tracing
from shardmap.sharding.mesh import group_counts


def has_mesh() -> bool:
    """Whether `jax.set_mesh` applies here, and no map is around."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return False
    # JAX sets a mesh without devices while it traces a `jax.shard_map`.
    return not concrete_mesh().empty and not tracing.inside_map()


def current_mesh_devices() -> list[jax.Device]:
    """The devices of the mesh of `jax.set_mesh`; none if there is no such mesh."""
    mesh = concrete_mesh()
    return [] if mesh.empty else list(mesh.devices.flat)


def is_on_mesh(devices: Sequence[jax.Device]) -> bool:
    """Whether these are the devices of `jax.set_mesh`, in its order."""
    return list(devices) == current_mesh_devices()


def check_devices(what: str, devices: Sequence[jax.Device]) -> None:
    """Refuses other devices than those of the program under `jax.set_mesh`."""
    if devices and has_mesh() and not is_on_mesh(devices):
        raise ValueError(
            f"{what} runs on the devices {[d.id for d in devices]}, but its program on "
            f"those of jax.set_mesh, {[d.id for d in current_mesh_devices()]}. Set a "
            "mesh of these devices, or leave out what names others."
        )


def device_put(tree: PyTree) -> Any:
    """Arguments of a program under `jax.set_mesh`, on the devices of that mesh.

    If the mesh has Explicit axes, the arguments have shardings on it.
    """
    leaves, structure = jax.tree.flatten(tree)
    mesh = concrete_mesh()
    has_types = AxisType.Explicit in mesh.axis_types
    everywhere = NamedSharding(mesh, PartitionSpec())

    def fits(leaf: Value) -> bool:
        if isinstance(leaf, jax.core.Tracer):
            return True
        if has_types:
            sharding = getattr(leaf, "sharding", None)
            return getattr(sharding, "mesh", None) == mesh
        if not isinstance(leaf, jax.Array):
            return not array_likes.is_array_like(leaf)
        if leaf.committed and isinstance(leaf.sharding, NamedSharding):
            return list(leaf.sharding.mesh.devices.flat) == list(mesh.devices.flat)
        return not leaf.committed or leaf.sharding.device_set == everywhere.device_set

    misplaced = [k for k, leaf in enumerate(leaves) if not fits(leaf)]
    with without_mesh():
        for k in misplaced:
            leaves[k] = placement.device_put(leaves[k], everywhere)
    return jax.tree.unflatten(structure, leaves)


def check_mesh(name: str, mesh: Mesh) -> None:
    """Refuses a mesh that splits an Explicit axis."""
    if not has_mesh():
        return
    there = concrete_mesh()
    if AxisType.Explicit not in there.axis_types:
        return
    counts, counts_there = (group_counts(m.devices.shape) for m in (mesh, there))
    if mesh.size != there.size or not counts <= counts_there:
        raise ValueError(
            f"{name} runs on a mesh {dict(mesh.shape)}, which is not made of whole "
            f"axes of the mesh of jax.set_mesh, {dict(there.shape)}, whose axes are "
            "Explicit: give it mesh= and mesh_axes= of that mesh."
        )
