"""From map equations to programs that run.

The manual lowering: one program per device with explicit collectives, by way of
`jax.shard_map`. A map inside another map walks a mesh axis of its own where there are
devices for it; where there are none its elements are one batched operation.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType

from shardmap._jax.context import (
    LoweringContext,
    lower_inside,
    manual_axes,
    mesh_around,
    program_of,
)
from shardmap._jax.evaluation import evaluate
from shardmap._jax.types import Jaxpr, Param, Value
from shardmap.arrays import placement
from shardmap.arrays.running import map_jit
from shardmap.map import agreement, contexts
from shardmap.map.collectives.names import in_mesh_order, told_apart
from shardmap.map.collectives.split import has_collectives
from shardmap.map.collectives.split_axis import SplitAxis
from shardmap.map.layout import MeshWalk, map_mesh, own_walk
from shardmap.map.lowering import decision
from shardmap.map.lowering.blocks import block_function
from shardmap.map.lowering.decision import Around
from shardmap.map.lowering.manual import per_device
from shardmap.map.lowering.one_program import check_meshes
from shardmap.map.lowering.spmd import partitioned
from shardmap.map.lowering.under_mesh import under_mesh
from shardmap.map.primitives.axis import REPLICAS, Spread, map_text
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.shardings import map_shardings
from shardmap.map.tracing import Body, config_value, per_jaxpr, trace_body
from shardmap.sharding.mesh import with_manual_axes

# Evaluation

_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
"""Settings under which a map runs operation by operation, on one device."""


def _implementation(*args: Value, **params: Param) -> list[Any]:
    if any(map(config_value, _DEBUGGING)):
        body = _without_calls(
            params["call_jaxpr"], params["axis_name"], params["axis_size"]
        )
        in_axes = (None,) * len(body.constants) + params["in_axes"]
        plain = params | {"call_jaxpr": body.jaxpr, "in_axes": in_axes}
        return list(map(_as_array, on_one_device(**plain)(*body.constants, *args)))
    if params["mesh"] is not None and contexts.has_mesh():
        return _program_under_mesh(**params)(*contexts.place(args))
    if REPLICAS in getattr(params["mesh"], "axis_names", ()):
        params = _as_operands_lie(args, params)
    jitted, shardings = _program(**params)
    return jitted(*placement.place(args, shardings))


def _as_operands_lie(args: Sequence[Any], params: dict[str, Any]) -> dict[str, Any]:
    """A map that is evaluated, on as many devices as its operands lie on.

    It has all devices of its mesh, unless operands lie on just those that it would have
    if it were called outside of any trace: then they were made so, and what comes of
    them here is to meet them.
    """
    mesh = map_mesh(
        params["axis_name"],
        params["axis_size"],
        params["call_jaxpr"],
        list(params["mesh"].devices.flat),
        "unused",
    )
    needed = set(mesh.devices.flat)
    if any(
        isinstance(arg, jax.Array)
        and arg.committed
        and arg.sharding.device_set == needed
        for arg in args
    ):
        return params | {"mesh": mesh} | own_walk(mesh)._asdict()
    return params


@per_jaxpr
def _without_calls(jaxpr: Jaxpr, axis_name: Hashable, axis_size: int) -> Body:
    """What ``jaxpr`` computes with what it calls in line.

    A jitted function that finds a NaN raises what only `jax.jit` itself understands.
    """
    return trace_body(
        lambda *args: evaluate(jaxpr, args, lambda equation, operands: None),
        [var.aval for var in jaxpr.invars],
        axis_name,
        axis_size,
    )


def _as_array(value: Value) -> Any:
    """What a function gives back as it got it may be NumPy's, not JAX's."""
    is_jax = isinstance(value, jax.Array) or value.dtype == jax.dtypes.float0
    return value if is_jax else jnp.asarray(value)


@functools.lru_cache(maxsize=4096)
def _program(**params: Param) -> tuple[Any, tuple[Any, ...] | None]:
    """The compiled form of one equation, and how its operands must lie."""
    run = functools.partial(spmap_p.bind, **params)
    mesh = params["mesh"]
    if mesh is None:
        return jax.jit(run), None
    operands, results = map_shardings(params)
    jitted = map_jit(
        run,
        list(mesh.devices.flat),
        communicates(params),
        in_shardings=operands,
        out_shardings=list(results),
    )
    return jitted, operands


@functools.lru_cache(maxsize=4096)
def _program_under_mesh(**params: Param) -> Any:
    """The same under `jax.set_mesh`, where results lie on that mesh."""
    run = functools.partial(spmap_p.bind, **params)
    devices = list(params["mesh"].devices.flat)
    return map_jit(lambda *args: run(*map(contexts.untyped, args)), devices, True)


def communicates(params: dict[str, Any]) -> bool:
    """Whether the program of a map has anything to send between devices."""
    walk = MeshWalk(params["mesh_axes"], params["inner_axes"])
    return (
        params["lowering"] == "spmd"
        or len(params["mesh"].axis_names) > len(walk.mesh_axes)
        or params["axis_size"] % walk.device_count(params["mesh"]) != 0
        or has_collectives(params["call_jaxpr"])
    )


# All elements in one program


def on_one_device(
    *,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Jaxpr,
    batch_size: int | None,
    mesh_axes: tuple[str, ...] | None,
    **_: object,
) -> Callable[..., list[Any]]:
    """A map without devices of its own: one block has all elements."""
    axis = SplitAxis(axis_name, axis_size, (), 1, axis_size, laid_over=mesh_axes or ())
    vectorised = Spread.of(axis_size, 1, batch_size).vectorised
    return block_function(call_jaxpr, axis, in_axes, out_axes, vectorised)


# One program per device


def _lowering(ctx: LoweringContext, *args: Value, **params: Param) -> Any:
    mesh = params["mesh"]
    manual = manual_axes(ctx)
    around = mesh_around(ctx) if manual else None
    walk = None if mesh is None else MeshWalk(params["mesh_axes"], params["inner_axes"])
    program = Around(() if around is None else around.axis_names, manual)
    decided = decision.decide(params, mesh, walk, program)
    if decided.branch == "around":
        here = AbstractMesh((), ())
        if around is not None:
            types = {name: AxisType.Manual for name in manual}
            here = around.abstract_mesh.update_axis_types(types)
        jaxpr = in_mesh_order(params["call_jaxpr"], here)
        params["call_jaxpr"] = under_mesh(jaxpr, here)
        with jax.sharding.use_abstract_mesh(here):
            return mlir.lower_fun(on_one_device(**params))(ctx, *args)
    if not manual:
        agreement.agree_to_lower(
            mesh, map_text(params), lambda: agreement.description(params)
        )
    by_partitioner = decided.branch == "partitioned"
    if not (manual or by_partitioner):
        check_meshes(program_of(ctx), map_text(params), mesh)
    params["mesh"] = mesh = with_manual_axes(mesh, manual)
    params["axis_name"], jaxpr = told_apart(
        params["axis_name"], params["call_jaxpr"], mesh.axis_names
    )
    params["call_jaxpr"] = in_mesh_order(jaxpr, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered_as = partitioned if by_partitioner else per_device
        run = lowered_as(decision=decided, **params)
        # Operands may be typed with shardings over a mesh of the caller's.
        avals = list(map(contexts.untyped_aval, ctx.avals_in))
        return lower_inside(ctx, run, avals, args)


spmap_p.def_impl(_implementation)
mlir.register_lowering(spmap_p, _lowering)
