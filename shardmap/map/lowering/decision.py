"""How a map is lowered: `lower_map` does what is decided here, `explain` reports it."""

import dataclasses
from collections.abc import Collection
from typing import Literal, NamedTuple

from jax.extend.core.primitives import cond_p, sharding_constraint_p, while_p
from jax.sharding import AbstractMesh

from shardmap._jax.context import NO_MESH
from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import AnyMesh
from shardmap._jax.walk import equations, primitives_in
from shardmap.map.collectives.split import lowers_per_device
from shardmap.map.constraint import constrain_p
from shardmap.map.differing import predicates_differ
from shardmap.map.lowering.effects import calls_host
from shardmap.map.primitives.axis import REPLICAS, AxisLayout
from shardmap.map.primitives.map_primitive import MapParams, is_no_map
from shardmap.sharding.mesh import with_manual_axes

Branch = Literal["inline", "partitioned", "unsharded", "element", "blocks"]


class EnclosingProgram(NamedTuple):
    """The program that a map is a part of.

    Attributes:
      mesh: that of the `jax.shard_map`s and maps around, with the axes manual along
        which the program is written per device; empty without one.
      is_partitioned: whether the partitioner cuts it.
    """

    mesh: AbstractMesh = NO_MESH
    is_partitioned: bool = False

    def inside(self, mesh: AnyMesh, manual_axes: Collection[str]) -> "EnclosingProgram":
        """The program inside one that is written per device along these axes too."""
        manual = {*self.mesh.manual_axes, *manual_axes}
        return EnclosingProgram(with_manual_axes(mesh.abstract_mesh, manual))


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a map is lowered.

    Attributes:
      axis: how its elements are laid out and run.
      branch: one of these.

        * "inline": each device of the program around the map vectorises all elements.
        * "partitioned": one block has all elements, and the partitioner cuts it.
        * "unsharded": one block has all elements, on a mesh of its own.
        * "element": each device runs the function itself, on one element.
        * "blocks": each device vectorises a block of elements.

      manual_axes: the mesh axes along which the function is written per device.
      slices_and_gathers: whether the program around is written per device along the
        map's mesh axes already. Each device then slices its block, and gathers all
        results.
    """

    axis: AxisLayout
    branch: Branch
    manual_axes: tuple[str, ...] = ()
    slices_and_gathers: bool = False

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that the elements are laid over, major to minor."""
        return self.axis.device_axes

    def inside(
        self, mesh: AnyMesh | None, around: EnclosingProgram
    ) -> EnclosingProgram:
        """The program around the maps in this one."""
        if self.branch in ("element", "blocks") and mesh is not None:
            return around.inside(mesh, self.manual_axes)
        is_partitioned = around.is_partitioned or self.branch == "partitioned"
        return around._replace(is_partitioned=is_partitioned)


def branches_differ(params: MapParams, around: EnclosingProgram) -> bool:
    """Whether elements may take different branches, outside of nested maps.

    False if something in the function cuts values along the other mesh axes.
    """
    jaxpr = params.call_jaxpr
    if primitives_in(jaxpr) & {SHARD_MAP, sharding_constraint_p, constrain_p}:
        return False
    if around.mesh.manual_axes:
        outside_of_maps = equations(jaxpr, is_no_map)
        return any(e.primitive in (cond_p, while_p) for e in outside_of_maps)
    mapped = tuple(axis is not None for axis in params.in_axes)
    return predicates_differ(jaxpr, params.axis_name, mapped)


def platform_of(mesh: AnyMesh) -> str:
    """The platform of a mesh, such as "cpu"; "" of an abstract one."""
    return "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform


def decide(params: MapParams, around: EnclosingProgram) -> Decision:
    """How a map is lowered, in the program that it is a part of."""
    mesh, mesh_axes, axis = params.mesh, params.mesh_axes, params.axis
    one_block = dataclasses.replace(axis, device_axes=(), devices=1, block=axis.size)
    if mesh is None or mesh_axes is None:
        return Decision(one_block, "inline")
    manual = {*around.mesh.manual_axes}
    if manual and around.mesh.axis_names != mesh.axis_names:
        return Decision(one_block, "inline")
    if around.is_partitioned or (params.lowering == "spmd" and not manual):
        return Decision(axis, "partitioned")
    # The partitioner refuses collectives along one device where others are.
    if not mesh_axes or axis.devices == 1 < mesh.size:
        return Decision(one_block, "unsharded")
    # Not every collective of JAX takes several mesh axes for one name.
    one_each = (
        axis.devices == axis.size
        and len(mesh_axes) == 1
        and lowers_per_device(params.call_jaxpr, axis.name, platform_of(mesh))
    )
    manual_axes = mesh_axes
    if REPLICAS in mesh.axis_names and REPLICAS not in manual:
        manual_axes = (*manual_axes, REPLICAS)
    if {*manual_axes} != {*mesh.axis_names} and (
        calls_host(params.call_jaxpr) or branches_differ(params, around)
    ):
        # JAX calls the host where a program is written per device along all axes. And
        # XLA puts collectives along other axes into branches that not all devices take.
        manual_axes = mesh.axis_names
    return Decision(
        axis,
        "element" if one_each else "blocks",
        manual_axes,
        slices_and_gathers=manual >= {*mesh_axes},
    )
