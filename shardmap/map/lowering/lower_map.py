"""The lowering of a map, from its equation to a program of its devices.

The manual lowering is one program per device with explicit collectives, by way of
`jax.shard_map`. A map inside another map is laid over a mesh axis of its own where
there are devices for it; else its elements are one batched operation. With
``lowering="spmd"`` a map is one vectorised program for the partitioner to cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import (
    NO_MESH,
    LoweringContext,
    argument_meshes,
    check_vma_off,
    lower_inside,
    manual_axes,
    mesh_around,
    module_of,
)
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.rules import Vmap
from shardmap._jax.types import Jaxpr, Param, Value, without_sharding
from shardmap._jax.walk import equations_with
from shardmap.map import agreement
from shardmap.map.layout import map_shardings, partition_spec
from shardmap.map.lowering.decision import (
    Decision,
    EnclosingProgram,
    decide,
)
from shardmap.map.lowering.loops import loop
from shardmap.map.lowering.steps import Scope, prepare
from shardmap.map.mesh_compatibility import check_meshes
from shardmap.map.primitives.axis import AxisLayout, pad, unpad
from shardmap.map.primitives.map_primitive import MapParams, MapPrimitive, spmap_p
from shardmap.sharding.mesh import with_manual_axes


def _lowering(ctx: LoweringContext, *args: Value, **params: Param) -> Any:
    around, mesh = NO_MESH, mesh_around(ctx)
    if mesh is not None:
        around = with_manual_axes(mesh, manual_axes(ctx)).abstract_mesh
    of_map = MapParams(**params)
    decided = decide(of_map, EnclosingProgram(around))
    if decided.branch != "inline" and not around.manual_axes:
        _check_program(ctx, of_map, decided)
    under, run = on_mesh(of_map, decided, around)
    # Operands may be typed with shardings over a mesh of the caller's.
    avals = list(map(without_sharding, ctx.avals_in))
    with check_vma_off(), jax.sharding.use_abstract_mesh(under):
        return lower_inside(ctx, run, avals, args)


def _check_program(ctx: LoweringContext, params: MapParams, decided: Decision) -> None:
    """Checks an outermost map against its program and other processes."""
    mesh, name = cast(Mesh, params.mesh), str(params)
    for equation in equations_with(params.call_jaxpr, SHARD_MAP):
        if both := manual_axes_of(equation) & {*decided.manual_axes}:
            calls = ", as it calls the host" if both - {*decided.mesh_axes} else ""
            raise NotImplementedError(
                f"{name} is written per device along mesh axes "
                f"{[*decided.manual_axes]}{calls}, but has a jax.shard_map over "
                f"{sorted(both)} inside. Give spmap lowering='spmd'."
            )
    agreement.agree(mesh, name, lambda: agreement.description(params))
    if decided.branch == "partitioned":
        return
    others = {*mesh.shape} - {*decided.manual_axes}
    is_partly_manual = any(mesh.shape[axis] > 1 for axis in others)
    arguments = argument_meshes(ctx) if is_partly_manual else ()
    check_meshes(module_of(ctx), name, mesh, arguments)


def on_mesh(
    params: MapParams, decided: Decision, around: AbstractMesh
) -> tuple[AbstractMesh, Callable[..., list[Any]]]:
    """The mesh under which a map is to be traced, and its function of operands.

    ``around`` is the mesh of the `jax.shard_map` around it, perhaps an empty one.
    """
    axes = params.in_axes, params.out_axes
    if decided.branch == "inline":
        scope = Scope.of_map(decided.axis, around, around)
        return around, block_function(params.call_jaxpr, *axes, scope)
    mesh = with_manual_axes(cast(Mesh, params.mesh), around.manual_axes)
    params = dataclasses.replace(params, mesh=mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if decided.branch == "partitioned":
            run = _partitioned(decided.axis, params)
        else:
            run = _per_device(decided, params)

    def padded(*operands: Value) -> list[Any]:
        with jax.named_scope(params.scope):
            if not (count := decided.axis.padding):
                return run(*operands)
            results = run(*pad(operands, axes[0], count))
            return unpad(results, axes[1], decided.axis)

    return mesh.abstract_mesh, padded


# A program per device


def _per_device(decided: Decision, params: MapParams) -> Callable[..., list[Any]]:
    """A map as `jax.shard_map`: on each device along some mesh axes, a block."""
    axis, mesh = decided.axis, cast(Mesh, params.mesh)
    in_axes, out_axes = params.in_axes, params.out_axes
    is_element = decided.branch == "element"
    scope = Scope.of_map(
        axis,
        mesh,
        with_manual_axes(mesh, decided.manual_axes).abstract_mesh,
        params.inner_axes,
        is_element,
    )
    function = _one_element if is_element else block_function
    block = function(params.call_jaxpr, in_axes, out_axes, scope)
    if decided.branch == "unsharded":
        return block
    if decided.slices_and_gathers:
        return _one_block_of_whole(block, axis, in_axes, out_axes)
    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh,
        out_specs=[partition_spec(axis.device_axes, a) for a in out_axes],
        axis_names={*decided.manual_axes},
        check_vma=False,
    )
    in_specs = tuple(partition_spec(axis.device_axes, a) for a in in_axes)

    def block_of_nothing(*operands: Value) -> list[Any]:
        blocks = []
        for operand, in_axis in zip(operands, in_axes, strict=True):
            shape = list(operand.shape)
            if in_axis is not None:
                shape[in_axis] = axis.block
            blocks.append(jnp.zeros(shape, operand.dtype))
        return block(*blocks)

    def run(*operands: Value) -> list[Any]:
        if all(
            x.size == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
            for x in operands
        ):
            # XLA drops such operands, and cannot compile if no other is left.
            return mapped(lambda: block_of_nothing(*operands), in_specs=())()
        return mapped(block, in_specs=in_specs)(*operands)

    return run


def _one_block_of_whole(
    block: Callable[..., Any],
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., list[Any]]:
    """In a shard_map over its axes: slice this block, all_gather the results."""

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
    jaxpr: Jaxpr,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    scope: Scope,
) -> Callable[..., list[Any]]:
    """A block of one: the function itself, its axis called as the mesh calls it."""
    jaxpr = prepare(jaxpr, scope)

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


# One program for the partitioner


def _partitioned(axis: AxisLayout, params: MapParams) -> Callable[..., list[Any]]:
    """A map as one vectorised program for the partitioner to split."""
    mesh = cast(Mesh, params.mesh)
    shardings = map_shardings(dataclasses.replace(params, axis_size=axis.padded_size))
    whole = AxisLayout(axis.name, axis.size, block=axis.padded_size)
    scope = Scope.of_map(whole, mesh, mesh.abstract_mesh)
    block = block_function(params.call_jaxpr, params.in_axes, params.out_axes, scope)

    def run(*operands: Value) -> list[Any]:
        results = block(*map(_constrained, operands, shardings.operands))
        return list(map(_constrained, results, shardings.results))

    return run


def _constrained(array: Value, sharding: NamedSharding) -> Any:
    """The array cut as a map wants it; other dimensions are left to the partitioner.

    It might be an element of a map around, which has them cut already.
    """
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    loose = [PartitionSpec.UNCONSTRAINED if e is None else e for e in entries]
    return jax.lax.with_sharding_constraint(
        array, sharding.update(spec=PartitionSpec(*loose))
    )


# Several elements on one device: vectorised, or in a loop of vectorised parts


def block_function(
    jaxpr: Jaxpr,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    scope: Scope,
) -> Callable[..., list[Any]]:
    """The function of one device's block of elements.

    A result without an axis is that of the first element.
    """
    axis = scope.axis
    jaxpr = prepare(jaxpr, scope)
    if scope.runs_as == "loop":
        return loop(jaxpr, axis, in_axes, out_axes)
    mapped = Vmap(axis.vectorized_name, axis.block).vectorize(
        lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args),
        in_axes,
        [0 if out_axis is None else out_axis for out_axis in out_axes],
    )

    def run(*blocks: Value) -> list[Any]:
        return [
            result[0] if out_axis is None else result
            for result, out_axis in zip(mapped(*blocks), out_axes, strict=True)
        ]

    return run


def register(primitive: MapPrimitive) -> None:
    """Registers the lowering; a map primitive of one's own does what it does alone."""

    def run(*args: Value, **params: Param) -> Any:
        return primitive.impl(*args, **params)

    rule = mlir.lower_fun(run, multiple_results=True)
    mlir.register_lowering(primitive, _lowering if primitive is spmap_p else rule)
