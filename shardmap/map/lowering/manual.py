"""Maps written per device: each runs its own block of elements."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardmap._jax.types import AnyMesh, Equation, Jaxpr, Value
from shardmap._jax.walk import rewrite_jaxpr
from shardmap.map.collectives.names import in_mesh_order, rename_axis
from shardmap.map.collectives.rewrites import widen
from shardmap.map.layout import inner_walk
from shardmap.map.lowering.blocks import block_function
from shardmap.map.lowering.decision import Decision
from shardmap.map.lowering.under_mesh import under_mesh
from shardmap.map.primitives.axis import AxisLayout, pad, unpad
from shardmap.map.primitives.map_primitive import is_no_map, spmap_p
from shardmap.map.shardings import partition_spec
from shardmap.sharding.mesh import with_manual_axes


def per_device(
    *,
    decision: Decision,
    axis_name: Hashable,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Jaxpr,
    mesh: AnyMesh,
    inner_axes: tuple[str, ...],
    **_: object,
) -> Callable[..., Any]:
    """A map as `jax.shard_map`: on each device along some mesh axes, a block."""
    axis = dataclasses.replace(decision.axis, name=axis_name)
    jaxpr = _with_inner_maps_on(mesh, call_jaxpr, inner_axes)
    if mesh.devices.flat[0].platform == "cpu" and len(mesh.axis_names) > 1:
        jaxpr = widen(jaxpr)
    if decision.branch == "whole":
        jaxpr = under_mesh(jaxpr, mesh.abstract_mesh)
        return block_function(jaxpr, axis, in_axes, out_axes)
    manual_axes = decision.manual_axes
    jaxpr = under_mesh(jaxpr, with_manual_axes(mesh, manual_axes).abstract_mesh)
    if decision.branch == "element":
        block = _one_element(jaxpr, axis, in_axes, out_axes, mesh)
    else:
        block = block_function(jaxpr, axis, in_axes, out_axes)
    if decision.gathers:
        mapped = one_block_of_whole(block, axis, in_axes, out_axes)
    else:
        mapped = _one_block_each(block, axis, in_axes, out_axes, mesh, manual_axes)
    return lambda *operands: unpad(
        mapped(*pad(operands, in_axes, axis.padding)), out_axes, axis
    )


def _one_block_each(
    block: Callable[..., Any],
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    mesh: AnyMesh,
    manual_axes: Collection[str],
) -> Callable[..., Any]:
    """`jax.shard_map` of a block."""

    def run(*operands: Value) -> list[Any]:
        # XLA drops operands without entries, and cannot compile if no other is left.
        given = [
            operand.size > 0 or jnp.issubdtype(operand.dtype, jax.dtypes.extended)
            for operand in operands
        ]

        def without_entries(operand: Value, in_axis: int | None) -> Any:
            shape = list(operand.shape)
            if in_axis is not None:
                shape[in_axis] = axis.block
            return jnp.zeros(shape, operand.dtype)

        def on_device(*blocks: Value) -> list[Any]:
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


def one_block_of_whole(
    block: Callable[..., Any],
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., Any]:
    """A map in a program that is per device already: each takes its block, and all
    get the results of all."""

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
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    mesh: AnyMesh,
) -> Callable[..., Any]:
    """A block of one: the function itself, its axis called as the mesh calls it."""

    (mesh_axis,) = axis.device_axes
    renamed = in_mesh_order(rename_axis(jaxpr, axis.name, mesh_axis), mesh)

    def element(*blocks: Value) -> list[Any]:
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


def _with_inner_maps_on(mesh: AnyMesh, jaxpr: Jaxpr, inner_axes: Sequence[str]) -> Any:
    """``jaxpr`` whose maps one level down know where on ``mesh`` they go."""

    def change(equation: Equation) -> Any:
        if equation.primitive is not spmap_p:
            return equation
        walk = inner_walk(equation, mesh, inner_axes)
        if walk is None:
            return equation
        return equation.replace(
            params=equation.params | walk._asdict() | {"mesh": mesh}
        )

    return rewrite_jaxpr(jaxpr, change, is_no_map)
