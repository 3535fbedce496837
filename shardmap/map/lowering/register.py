"""From map equations to programs that run.

The manual lowering: one program per device with explicit collectives, by way of
`jax.shard_map`. A map inside another map walks a mesh axis of its own where there are
devices for it; where there are none its elements are one batched operation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType

from shardmap._jax.arrays import types_unchecked
from shardmap._jax.context import (
    NO_MESH,
    LoweringContext,
    argument_meshes,
    lower_inside,
    manual_axes,
    mesh_around,
    module_of,
)
from shardmap._jax.types import AnyMesh, Param, Value, without_sharding
from shardmap.map import agreement
from shardmap.map.collectives.names import for_mesh, in_mesh_order
from shardmap.map.layout import MeshPlacement
from shardmap.map.lowering import decision
from shardmap.map.lowering.blocks import on_one_device
from shardmap.map.lowering.decision import Around, Decision
from shardmap.map.lowering.evaluation import evaluate_map
from shardmap.map.lowering.manual import per_device
from shardmap.map.lowering.mesh_compatibility import check_arguments, check_meshes
from shardmap.map.lowering.spmd import partitioned
from shardmap.map.lowering.under_mesh import under_mesh
from shardmap.map.primitives.axis import map_text
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p
from shardmap.sharding.mesh import with_manual_axes


def _lowering(ctx: LoweringContext, *args: Value, **params: Param) -> Any:
    mesh, manual = params["mesh"], manual_axes(ctx)
    around = mesh_around(ctx) if manual else None
    walk = (
        None
        if mesh is None
        else MeshPlacement(params["mesh_axes"], params["inner_axes"])
    )
    program = Around(() if around is None else around.axis_names, manual)
    decided = decision.decide(params, mesh, walk, program)
    if decided.branch == "around":
        return _lower_on_one_device(ctx, args, params, around)
    if not manual:
        agreement.agree(mesh, map_text(params), lambda: agreement.description(params))
    if decided.branch == "partitioned":
        return _lower_on_mesh(ctx, args, params, decided, partitioned)
    if not manual:
        check_meshes(module_of(ctx), map_text(params), mesh)
        if any(mesh.shape[axis] > 1 for axis in {*mesh.shape} - {*decided.manual_axes}):
            check_arguments(map_text(params), mesh, argument_meshes(ctx))
    return _lower_on_mesh(ctx, args, params, decided, per_device)


def _lower_on_one_device(
    ctx: LoweringContext,
    args: Sequence[Value],
    params: dict[str, Param],
    around: AnyMesh | None,
) -> Any:
    """A map that has no devices of its own, in the program of one around or alone."""
    here: AbstractMesh = NO_MESH
    if around is not None:
        types = dict.fromkeys(manual_axes(ctx), AxisType.Manual)
        here = around.abstract_mesh.update_axis_types(types)
    jaxpr = in_mesh_order(params["call_jaxpr"], here)
    params = params | {"call_jaxpr": under_mesh(jaxpr, here)}
    avals = list(map(without_sharding, ctx.avals_in))
    with types_unchecked(), jax.sharding.use_abstract_mesh(here):
        return lower_inside(ctx, on_one_device(**params), avals, args)


def _lower_on_mesh(
    ctx: LoweringContext,
    args: Sequence[Value],
    params: dict[str, Param],
    decided: Decision,
    lower: Callable[..., Callable[..., Any]],
) -> Any:
    """A map on the devices of its mesh, as ``lower`` makes it of its parameters."""
    mesh = with_manual_axes(params["mesh"], manual_axes(ctx))
    axis_name, jaxpr = for_mesh(params["axis_name"], params["call_jaxpr"], mesh)
    changed = {"mesh": mesh, "axis_name": axis_name, "call_jaxpr": jaxpr}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = lower(decision=decided, **params | changed)
        # Operands may be typed with shardings over a mesh of the caller's.
        avals = list(map(without_sharding, ctx.avals_in))
        return lower_inside(ctx, run, avals, args)


def _register(primitive: MapPrimitive) -> None:
    """Lowers a map of one's own to what it does where it runs."""

    def run(*args: Value, **params: Param) -> Any:
        return primitive.impl(*args, **params)

    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))


MapPrimitive.def_rules(_register)
spmap_p.def_impl(evaluate_map)
mlir.register_lowering(spmap_p, _lowering)
