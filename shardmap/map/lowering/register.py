"""From map equations to programs that run.

The manual lowering: one program per device with explicit collectives, by way of
`jax.shard_map`. A map inside another map walks a mesh axis of its own where there are
devices for it; where there are none its elements are one batched operation.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.evaluation import evaluate
from shardmap.arrays import placement, processes
from shardmap.arrays.running import map_jit
from shardmap.map import contexts
from shardmap.map.collectives.names import in_mesh_order, rename_axis, told_apart
from shardmap.map.collectives.rules import SUMMING, has_collectives, lowers_per_device
from shardmap.map.collectives.split_axis import SplitAxis, pad_last
from shardmap.map.layout import (
    MeshWalk,
    inner_walk,
    map_mesh,
    map_shardings,
    own_walk,
    partition_spec,
)
from shardmap.map.lowering.blocks import block_function
from shardmap.map.lowering.host_calls import calls_host, on_first_devices
from shardmap.map.lowering.one_program import check_meshes
from shardmap.map.primitives.axis import REPLICAS
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.rewriting import rewrite_jaxpr, under_mesh, widen
from shardmap.map.primitives.tap import is_tapped, tap_p
from shardmap.map.tracing import Body, config_value, per_jaxpr, trace_body

# Evaluation

_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
"""Settings under which a map runs operation by operation, on one device."""


def _implementation(*args: Any, **params: Any) -> list[Any]:
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
def _without_calls(jaxpr: Any, axis_name: Hashable, axis_size: int) -> Body:
    """What ``jaxpr`` computes with what it calls in line.

    A jitted function that finds a NaN raises what only `jax.jit` itself understands.
    """
    return trace_body(
        lambda *args: evaluate(jaxpr, args, lambda equation, operands: None),
        [var.aval for var in jaxpr.invars],
        axis_name,
        axis_size,
    )


def _as_array(value: Any) -> Any:
    """What a function gives back as it got it may be NumPy's, not JAX's."""
    is_jax = isinstance(value, jax.Array) or value.dtype == jax.dtypes.float0
    return value if is_jax else jnp.asarray(value)


@functools.lru_cache(maxsize=4096)
def _program(**params: Any) -> tuple[Any, tuple[Any, ...] | None]:
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
def _program_under_mesh(**params: Any) -> Any:
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
    call_jaxpr: Any,
    batch_size: int | None,
    mesh_axes: tuple[str, ...] | None,
    **_: Any,
) -> Callable[..., list[Any]]:
    """A map without devices of its own: one block has all elements."""
    axis = SplitAxis(axis_name, axis_size, (), 1, axis_size, laid_over=mesh_axes or ())
    return block_function(call_jaxpr, axis, in_axes, out_axes, batch_size)


def partitioned(**params: Any) -> Callable[..., list[Any]]:
    """A map as one vectorised program for the partitioner to split."""
    mesh, in_axes, out_axes = params["mesh"], params["in_axes"], params["out_axes"]
    walk = MeshWalk(params["mesh_axes"], params["inner_axes"])
    places = walk.block(mesh, params["axis_size"]) * walk.device_count(mesh)
    axis = SplitAxis(
        params["axis_name"],
        params["axis_size"],
        (),
        1,
        places,
        laid_over=walk.mesh_axes,
    )
    jaxpr = _with_taps_on(mesh, params["call_jaxpr"], walk.inner_axes)
    jaxpr = under_mesh(jaxpr, mesh.abstract_mesh)
    block = block_function(jaxpr, axis, in_axes, out_axes, None)
    padded = params | {"axis_size": places}
    operand_shardings, result_shardings = map_shardings(padded)

    def run(*operands: Any) -> list[Any]:
        results = block(
            *map(_cut, pad(operands, in_axes, axis.padding), operand_shardings)
        )
        constrained = map(_cut, results, result_shardings)
        return unpad(list(constrained), out_axes, axis)

    return run


def _with_taps_on(mesh: Any, jaxpr: Any, inner_axes: Sequence[str]) -> Any:
    """``jaxpr`` whose taps know the mesh, and whose maps where they are laid on it."""
    if not is_tapped(jaxpr):
        return jaxpr

    def change(equation: Any, shadowed: bool) -> Any:
        params = equation.params
        if equation.primitive is tap_p:
            return equation.replace(params=params | {"mesh": mesh})
        if equation.primitive is not spmap_p:
            return equation
        walk = inner_walk(equation, mesh, inner_axes) or MeshWalk((), ())
        inside = _with_taps_on(mesh, params["call_jaxpr"], walk.inner_axes)
        changed = walk._asdict() | {"call_jaxpr": inside}
        return equation.replace(params=params | changed)

    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)


def _cut(array: Any, sharding: NamedSharding) -> Any:
    """The array cut as a map wants it; other dimensions are left to the partitioner.

    It might be an element of a map around, which has them cut already.
    """
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    loose = [PartitionSpec.UNCONSTRAINED if e is None else e for e in entries]
    return jax.lax.with_sharding_constraint(
        array, NamedSharding(sharding.mesh, PartitionSpec(*loose))
    )


def pad(operands: Sequence[Any], axes: Sequence[int | None], count: int) -> list[Any]:
    """Adds ``count`` elements to what is mapped."""
    return [
        operand if axis is None else pad_last(operand, count, axis)
        for operand, axis in zip(operands, axes, strict=True)
    ]


def unpad(
    results: Sequence[Any], axes: Sequence[int | None], axis: SplitAxis
) -> list[Any]:
    """Takes off what `pad` put on."""
    if not axis.padding:
        return list(results)
    return [
        result
        if out_axis is None
        else jax.lax.slice_in_dim(result, 0, axis.size, axis=out_axis)
        for result, out_axis in zip(results, axes, strict=True)
    ]


# One program per device


def per_device(
    *,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Any,
    mesh: Any,
    mesh_axes: tuple[str, ...],
    inner_axes: tuple[str, ...],
    batch_size: int | None,
    **_: Any,
) -> Callable[..., Any]:
    """A map as `jax.shard_map`: on each device along ``mesh_axes``, a block."""
    walk = MeshWalk(mesh_axes, inner_axes)
    axis = SplitAxis(
        axis_name,
        axis_size,
        mesh_axes,
        walk.device_count(mesh),
        walk.block(mesh, axis_size),
    )
    jaxpr = _with_inner_maps_on(mesh, call_jaxpr, inner_axes)
    platform = mesh.devices.flat[0].platform
    if platform == "cpu" and len(mesh.axis_names) > 1:
        jaxpr = widen(jaxpr, SUMMING)
    if not mesh_axes or axis.devices == 1 < mesh.size:
        # The partitioner refuses collectives along one device where others are.
        axis = SplitAxis(axis_name, axis_size, (), 1, axis_size)
        jaxpr = under_mesh(jaxpr, mesh.abstract_mesh)
        return block_function(jaxpr, axis, in_axes, out_axes, batch_size)
    manual_axes = mesh_axes
    if REPLICAS in mesh.axis_names and not is_manual(mesh, [REPLICAS]):
        manual_axes = (*mesh_axes, REPLICAS)
    if calls_host(call_jaxpr, mesh, mesh_axes):
        manual_axes = mesh.axis_names
        if not is_manual(mesh, mesh_axes):
            jaxpr = on_first_devices(jaxpr, mesh, walk)
    jaxpr = under_mesh(jaxpr, _with_manual_axes(mesh, manual_axes).abstract_mesh)
    # Not every collective of JAX takes several mesh axes for one name.
    if (
        axis.devices == axis_size
        and len(mesh_axes) == 1
        and lowers_per_device(jaxpr, axis_name, platform)
    ):
        block = _one_element(jaxpr, axis, in_axes, out_axes, mesh)
    else:
        block = block_function(jaxpr, axis, in_axes, out_axes, batch_size)
    if is_manual(mesh, mesh_axes):
        mapped = _one_block_of_whole(block, axis, in_axes, out_axes)
    else:
        mapped = _one_block_each(block, axis, in_axes, out_axes, mesh, manual_axes)
    return lambda *operands: unpad(
        mapped(*pad(operands, in_axes, axis.padding)), out_axes, axis
    )


def _one_block_each(
    block: Callable[..., Any],
    axis: SplitAxis,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    mesh: Any,
    manual_axes: Collection[str],
) -> Callable[..., Any]:
    """`jax.shard_map` of a block."""

    def run(*operands: Any) -> list[Any]:
        # XLA drops operands without entries, and cannot compile if no other is left.
        given = [
            operand.size > 0 or jnp.issubdtype(operand.dtype, jax.dtypes.extended)
            for operand in operands
        ]

        def without_entries(operand: Any, in_axis: int | None) -> Any:
            shape = list(operand.shape)
            if in_axis is not None:
                shape[in_axis] = axis.block
            return jnp.zeros(shape, operand.dtype)

        def on_device(*blocks: Any) -> list[Any]:
            rest = iter(blocks)
            return block(
                *(
                    next(rest) if is_given else without_entries(operand, in_axis)
                    for operand, in_axis, is_given in zip(
                        operands, in_axes, given, strict=True
                    )
                )
            )

        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=tuple(
                partition_spec(axis.device_axes, in_axis)
                for in_axis, is_given in zip(in_axes, given, strict=True)
                if is_given
            ),
            out_specs=[partition_spec(axis.device_axes, a) for a in out_axes],
            axis_names=set(manual_axes),
            check_vma=False,
        )
        return mapped(*(o for o, g in zip(operands, given, strict=True) if g))

    return run


def is_manual(mesh: Any, mesh_axes: Collection[str]) -> bool:
    """Whether the program is written per device along these axes already."""
    return set(mesh_axes) <= {
        name
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type == AxisType.Manual
    }


def _one_block_of_whole(
    block: Callable[..., Any],
    axis: SplitAxis,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., Any]:
    """A map in a program that is per device already: each takes its block, and all
    get the results of all."""

    def run(*operands: Any) -> list[Any]:
        start = jax.lax.axis_index(axis.device_axes) * axis.block
        results = block(
            *(
                operand
                if in_axis is None
                else jax.lax.dynamic_slice_in_dim(operand, start, axis.block, in_axis)
                for operand, in_axis in zip(operands, in_axes, strict=True)
            )
        )
        return [
            result
            if out_axis is None
            else jax.lax.all_gather(result, axis.device_axes, axis=out_axis, tiled=True)
            for result, out_axis in zip(results, out_axes, strict=True)
        ]

    return run


def _one_element(
    jaxpr: Any,
    axis: SplitAxis,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    mesh: Any,
) -> Callable[..., Any]:
    """A block of one: the function itself, its axis called as the mesh calls it."""

    (mesh_axis,) = axis.device_axes
    renamed = in_mesh_order(rename_axis(jaxpr, axis.name, mesh_axis), mesh)

    def element(*blocks: Any) -> list[Any]:
        operands = [
            block if in_axis is None else jax.lax.squeeze(block, (in_axis,))
            for block, in_axis in zip(blocks, in_axes, strict=True)
        ]
        results = jax.core.eval_jaxpr(renamed, (), *operands)
        return [
            result if out_axis is None else jax.lax.expand_dims(result, (out_axis,))
            for result, out_axis in zip(results, out_axes, strict=True)
        ]

    return element


def _with_inner_maps_on(mesh: Any, jaxpr: Any, inner_axes: Sequence[str]) -> Any:
    """``jaxpr`` whose maps one level down know where on ``mesh`` they go."""

    def change(equation: Any, shadowed: bool) -> Any:
        if shadowed or equation.primitive is not spmap_p:
            return equation
        walk = inner_walk(equation, mesh, inner_axes)
        if walk is None:
            return equation
        return equation.replace(
            params=equation.params | walk._asdict() | {"mesh": mesh}
        )

    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)


def _with_manual_axes(mesh: Mesh, names: Collection[str]) -> Mesh:
    """The mesh as it is called where a program is written per device along axes."""
    types = [
        AxisType.Manual if name in names else axis_type
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
    ]
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(types))


def _lowering(ctx: Any, *args: Any, **params: Any) -> Any:
    mesh = params["mesh"]
    context = ctx.module_context.axis_context
    manual: frozenset[Any] = getattr(context, "manual_axes", frozenset())
    around = context.mesh.axis_names if manual else ()
    if mesh is None or (manual and around != mesh.axis_names):
        here = AbstractMesh((), ())
        if manual:
            types = {name: AxisType.Manual for name in manual}
            here = context.mesh.abstract_mesh.update_axis_types(types)
        jaxpr = in_mesh_order(params["call_jaxpr"], here)
        params["call_jaxpr"] = under_mesh(jaxpr, here)
        with jax.sharding.use_abstract_mesh(here):
            return mlir.lower_fun(on_one_device(**params))(ctx, *args)
    if not manual:
        processes.agree_to_lower(
            mesh, f"spmap of {params['name']}", lambda: processes.description(params)
        )
    by_partitioner = params["lowering"] == "spmd" and not manual
    if not (manual or by_partitioner):
        check_meshes(ctx.module_context.host_callbacks, params["name"], mesh)
    params["mesh"] = mesh = _with_manual_axes(mesh, manual)
    params["axis_name"], jaxpr = told_apart(
        params["axis_name"], params["call_jaxpr"], mesh.axis_names
    )
    params["call_jaxpr"] = in_mesh_order(jaxpr, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = (partitioned if by_partitioner else per_device)(**params)
        # Operands may be typed with shardings over a mesh of the caller's.
        avals = list(map(contexts.untyped_aval, ctx.avals_in))
        inner = ctx.replace(avals_in=avals, tokens_out=None)
        results = mlir.lower_fun(run)(inner, *args)
        ctx.set_tokens_out(inner.tokens_out)
        return results


spmap_p.def_impl(_implementation)
mlir.register_lowering(spmap_p, _lowering)
