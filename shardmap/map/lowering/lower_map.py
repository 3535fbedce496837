"""The lowering of a map, from its equation to a program of its devices.

The manual lowering is one program per device with explicit collectives, by way of
`jax.shard_map`. A map inside another map is laid over a mesh axis of its own where
there are devices for it; else its elements are one batched operation. With
``lowering="spmd"`` a map is one vectorised program for the partitioner to cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardmap._jax.context import (
    NO_MESH,
    LoweringContext,
    argument_meshes,
    lower_inside,
    manual_axes,
    mesh_around,
    module_of,
    types_unchecked,
)
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.types import (
    AnyMesh,
    Equation,
    Jaxpr,
    Param,
    Value,
    without_sharding,
)
from shardmap._jax.walk import equations, rewrite_jaxpr
from shardmap.map import agreement
from shardmap.map.collectives.rewrites import (
    for_mesh,
    in_mesh_order,
    upcast_bfloat16_reductions,
)
from shardmap.map.collectives.split import split_collectives, with_batching_rules
from shardmap.map.layout import (
    MeshPlacement,
    inner_placement,
    map_shardings,
    partition_spec,
)
from shardmap.map.lowering import decision
from shardmap.map.lowering.decision import Decision, Enclosing
from shardmap.map.lowering.effects import call_for_each
from shardmap.map.lowering.loops import loop
from shardmap.map.lowering.under_mesh import under_mesh
from shardmap.map.mesh_compatibility import check_meshes
from shardmap.map.primitives.axis import AxisLayout, map_text, pad, unpad
from shardmap.map.primitives.map_primitive import MapPrimitive, is_no_map, spmap_p
from shardmap.map.tracing import Batch
from shardmap.sharding.mesh import with_manual_axes


def _lowering(ctx: LoweringContext, *args: Value, **params: Param) -> Any:
    mesh, manual = params["mesh"], manual_axes(ctx)
    around = mesh_around(ctx) if manual else None
    placement = None if mesh is None else MeshPlacement.of(params)
    program = Enclosing(() if around is None else around.axis_names, manual)
    decided = decision.decide(params, mesh, placement, program)
    if decided.branch == "inline":
        return _lower_on_one_device(ctx, args, params, around)
    if not manual:
        _check_program(ctx, params, decided)
    return _lower_on_mesh(ctx, args, params, decided)


def _check_program(
    ctx: LoweringContext, params: dict[str, Param], decided: Decision
) -> None:
    """Checks an outermost map against its program and other processes.

    Raises:
      NotImplementedError: its mesh does not fit the program, or its function calls the
        host beside a `jax.shard_map`.
    """
    mesh, name = params["mesh"], map_text(params)
    for equation in equations(params["call_jaxpr"]):
        if equation.primitive is SHARD_MAP and (
            both := manual_axes_of(equation) & {*decided.manual_axes}
        ):
            raise NotImplementedError(
                f"{name} calls the host, and has a jax.shard_map over mesh axes "
                f"{sorted(both)} inside: JAX calls the host only where a program is "
                "written per device along all mesh axes. Give spmap lowering='spmd', "
                "or call the host outside of the map."
            )
    agreement.agree(mesh, name, lambda: agreement.description(params))
    if decided.branch == "partitioned":
        return
    others = {*mesh.shape} - {*decided.manual_axes}
    is_partly_manual = any(mesh.shape[axis] > 1 for axis in others)
    arguments = argument_meshes(ctx) if is_partly_manual else ()
    check_meshes(module_of(ctx), name, mesh, arguments)


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
) -> Any:
    """A map on the devices of its mesh."""
    mesh, run = on_mesh(params, decided, manual_axes(ctx))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        # Operands may be typed with shardings over a mesh of the caller's.
        avals = list(map(without_sharding, ctx.avals_in))
        return lower_inside(ctx, run, avals, args)


def on_mesh(
    params: dict[str, Param], decided: Decision, manual: Collection[str]
) -> tuple[AnyMesh, Callable[..., Any]]:
    """The mesh of a map inside a program that is manual along some axes.

    Returns:
      The mesh, and the function that runs the map under it.
    """
    mesh = with_manual_axes(params["mesh"], manual)
    mesh_axis = decided.axis.device_axes[0] if decided.branch == "element" else None
    axis_name, jaxpr = for_mesh(
        params["axis_name"], params["call_jaxpr"], mesh, mesh_axis
    )
    changed = {"mesh": mesh, "axis_name": axis_name, "call_jaxpr": jaxpr}
    lower = partitioned if decided.branch == "partitioned" else per_device
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return mesh, lower(decided=decided, **params | changed)


# A program per device


def per_device(
    *,
    decided: Decision,
    axis_name: Hashable,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Jaxpr,
    mesh: AnyMesh,
    inner_axes: tuple[str, ...],
    **_: object,
) -> Callable[..., Any]:
    """A map as `jax.shard_map`: on each device along some mesh axes, a block."""
    axis = dataclasses.replace(decided.axis, name=axis_name)
    jaxpr = _with_inner_maps_on(mesh, call_jaxpr, inner_axes)
    if decision.platform_of(mesh) == "cpu" and len(mesh.axis_names) > 1:
        jaxpr = upcast_bfloat16_reductions(jaxpr)
    manual = decided.manual_axes
    jaxpr = under_mesh(jaxpr, with_manual_axes(mesh, manual).abstract_mesh)
    if decided.branch == "element":
        block = _one_element(jaxpr, in_axes, out_axes)
    else:
        block = block_function(jaxpr, axis, in_axes, out_axes)
    if decided.branch == "unsharded":
        return block
    if decided.gathers:
        mapped = one_block_of_whole(block, axis, in_axes, out_axes)
    else:
        mapped = _one_block_each(block, axis, in_axes, out_axes, mesh, manual)
    return lambda *operands: unpad(
        mapped(*pad(operands, in_axes, axis.padding)), out_axes, axis
    )


def _one_block_each(
    block: Callable[..., Any],
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    mesh: AnyMesh,
    manual: Collection[str],
) -> Callable[..., Any]:
    """`jax.shard_map` of a block."""
    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh,
        out_specs=[partition_spec(axis.device_axes, a) for a in out_axes],
        axis_names=set(manual),
        check_vma=False,
    )

    def is_empty(operand: Value) -> bool:
        is_extended = jnp.issubdtype(operand.dtype, jax.dtypes.extended)
        return operand.size == 0 and not is_extended

    def empty_block(operand: Value, in_axis: int | None) -> jax.Array:
        shape = list(operand.shape)
        if in_axis is not None:
            shape[in_axis] = axis.block
        return jnp.zeros(shape, operand.dtype)

    def run(*operands: Value) -> list[Any]:
        if all(map(is_empty, operands)):
            # XLA drops such operands, and cannot compile if no other is left.
            return mapped(
                lambda: block(*map(empty_block, operands, in_axes)), in_specs=()
            )()
        in_specs = tuple(partition_spec(axis.device_axes, a) for a in in_axes)
        return mapped(block, in_specs=in_specs)(*operands)

    return run


def one_block_of_whole(
    block: Callable[..., Any],
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., Any]:
    """A map inside a program per device along its axes: takes a block, gathers all."""

    def run(*operands: Value) -> list[Any]:
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
    jaxpr: Jaxpr, in_axes: Sequence[int | None], out_axes: Sequence[int | None]
) -> Callable[..., Any]:
    """A block of one: the function itself, its axis called as the mesh calls it."""

    def element(*blocks: Value) -> list[Any]:
        operands = [
            block if in_axis is None else jax.lax.squeeze(block, (in_axis,))
            for block, in_axis in zip(blocks, in_axes, strict=True)
        ]
        results = jax.core.eval_jaxpr(jaxpr, (), *operands)
        return [
            result if out_axis is None else jax.lax.expand_dims(result, (out_axis,))
            for result, out_axis in zip(results, out_axes, strict=True)
        ]

    return element


def _with_inner_maps_on(mesh: AnyMesh, jaxpr: Jaxpr, inner_axes: Sequence[str]) -> Any:
    """``jaxpr`` whose maps one level down have a placement on ``mesh``."""

    def change(equation: Equation) -> Any:
        if equation.primitive is not spmap_p:
            return equation
        placement = inner_placement(equation, mesh, inner_axes)
        if placement is None:
            return equation
        return equation.replace(
            params=equation.params | placement._asdict() | {"mesh": mesh}
        )

    return rewrite_jaxpr(jaxpr, change, is_no_map)


# One program for the partitioner


def partitioned(*, decided: Decision, **params: Param) -> Callable[..., list[Any]]:
    """A map as one vectorised program for the partitioner to split."""
    mesh, in_axes, out_axes = params["mesh"], params["in_axes"], params["out_axes"]
    places = decided.axis.places
    axis = AxisLayout(params["axis_name"], params["axis_size"], block=places)
    jaxpr = under_mesh(params["call_jaxpr"], mesh.abstract_mesh)
    block = block_function(jaxpr, axis, in_axes, out_axes)
    padded = params | {"axis_size": places}
    operand_shardings, result_shardings = map_shardings(padded)

    def run(*operands: Value) -> list[Any]:
        results = block(
            *map(_cut, pad(operands, in_axes, axis.padding), operand_shardings)
        )
        constrained = map(_cut, results, result_shardings)
        return unpad(list(constrained), out_axes, axis)

    return run


def _cut(array: Value, sharding: NamedSharding) -> Any:
    """The array cut as a map wants it; other dimensions are left to the partitioner.

    It might be an element of a map around, which has them cut already.
    """
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    loose = [PartitionSpec.UNCONSTRAINED if e is None else e for e in entries]
    return jax.lax.with_sharding_constraint(
        array,
        NamedSharding(
            sharding.mesh, PartitionSpec(*loose), memory_kind=sharding.memory_kind
        ),
    )


# Several elements on one device: vectorised, or in a loop of vectorised parts


def block_function(
    jaxpr: Jaxpr,
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., list[Any]]:
    """The function of one device's block of elements.

    Args:
      jaxpr: what one element computes.
      axis: the mapped axis.
      in_axes: where operands have the block of elements; None: one for all.
      out_axes: where results have it; None: the first element's result.
    """
    jaxpr = with_batching_rules(jaxpr)
    if axis.steps > 1:
        return loop(jaxpr, axis, in_axes, out_axes)
    split = call_for_each(split_collectives(jaxpr, axis), axis)
    mapped = Batch(axis.vectorized_name, axis.block).vectorize(
        split,
        in_axes,
        [0 if out_axis is None else out_axis for out_axis in out_axes],
    )

    def run(*blocks: Value) -> list[Any]:
        return [
            result[0] if out_axis is None else result
            for result, out_axis in zip(mapped(*blocks), out_axes, strict=True)
        ]

    return run


def on_one_device(
    *,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Jaxpr,
    batch_size: int | None,
    **_: object,
) -> Callable[..., list[Any]]:
    """A map without devices of its own: one block has all elements."""
    axis = AxisLayout(axis_name, axis_size, batch_size=batch_size)
    return block_function(call_jaxpr, axis, in_axes, out_axes)


def _register(primitive: MapPrimitive) -> None:
    """Lowers a map of one's own to what it does where it runs."""

    def run(*args: Value, **params: Param) -> Any:
        return primitive.impl(*args, **params)

    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))


MapPrimitive.def_rules(_register)
mlir.register_lowering(spmap_p, _lowering)
