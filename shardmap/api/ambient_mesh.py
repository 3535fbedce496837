"""The program around a map: other maps, `jax.shard_map` and `jax.set_mesh`."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from shardmap._jax.types import Aval, Value
from shardmap.api.options import SpmapOptions
from shardmap.arrays import processes
from shardmap.map import set_mesh, tracing
from shardmap.sharding.mesh import mesh_devices


def devices_of(options: SpmapOptions) -> list[jax.Device]:
    """The devices of a map: of its mesh, its own, those that are set, or all."""
    if options.mesh is not None:
        return mesh_devices(options.mesh) or set_mesh.current_mesh_devices()
    if options.devices is not None:
        return list(options.devices)
    if options.backend is None and set_mesh.has_mesh():
        return set_mesh.current_mesh_devices()
    return processes.all_devices(options.backend)


def typed_devices(
    devices: list[jax.Device], options: SpmapOptions, operands: Sequence[Aval]
) -> list[jax.Device]:
    """The devices of a map in a program: as many as its operands are on.

    What a map of few elements returned is on the first devices only, and so is the
    program that it is an argument of. Its type tells how many those are.
    """
    meshes = [aval.sharding.mesh for aval in operands]
    sizes = {mesh.size for mesh in meshes if not mesh.empty}
    if options.devices or options.backend or set_mesh.has_mesh() or len(sizes) != 1:
        return devices
    return devices[: sizes.pop()]


def typed(value: Value, mesh: Mesh) -> Any:
    """A value of a program that is being traced, with this mesh in its type."""
    aval = jax.typeof(value)
    if not aval.sharding.mesh.empty or aval.dtype == jax.dtypes.float0:
        return value
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * aval.ndim)
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def check_in_shard_map(name: str, options: SpmapOptions) -> None:
    """Checks the devices and mesh axes of a map inside `jax.shard_map`."""
    around = jax.sharding.get_abstract_mesh()
    is_elsewhere = options.devices is not None or options.backend is not None
    if options.mesh is not None:
        is_elsewhere = same_mesh(options, around) is None
    both = set(options.mesh_axes or ()) & set(around.manual_axes)
    if is_elsewhere or both:
        named = f"the devices {[device.id for device in devices_of(options)]}"
        if options.mesh is not None:
            named = f"mesh_axes={options.mesh_axes} of {dict(options.mesh.shape)}"
        raise ValueError(
            f"spmap of {name} is inside jax.shard_map over {around.manual_axes} of a "
            f"mesh {dict(around.shape)}, but names {named}. Leave that out, or name "
            "other axes of that mesh with mesh= and mesh_axes=."
        )


def axis_env_markers(
    name: str, options: SpmapOptions
) -> list[tracing.DevicesMarker | tracing.MeshAxisMarker]:
    """The markers of a map in the axis environment, for maps inside it."""
    known: list[tracing.DevicesMarker | tracing.MeshAxisMarker] = [
        tracing.MeshAxisMarker(mesh_axis) for mesh_axis in options.mesh_axes or ()
    ]
    if not tracing.inside_map():
        return [*known, tracing.DevicesMarker(tuple(devices_of(options)))]
    if options.devices is not None or options.backend is not None:
        devices = devices_of(options)
        if not tracing.is_bound(tracing.DevicesMarker(tuple(devices))):
            raise ValueError(
                f"spmap of {name} names the devices "
                f"{[device.id for device in devices]}, but is inside a map on others, "
                "or in another order. Leave devices and backend out of the inner map."
            )
    return known


def same_mesh(options: SpmapOptions, around: AbstractMesh) -> AbstractMesh | None:
    """The mesh of a map, if it is that of `jax.set_mesh`."""
    if options.mesh is None or around.empty:
        return None
    mesh = options.mesh.abstract_mesh
    return mesh if mesh.shape_tuple == around.shape_tuple else None
