"""The batching rule of maps: the batch goes to the function of one element."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Jaxpr, Param
from shardmap._jax.walk import per_jaxpr
from shardmap.map.collectives.split import vectorized
from shardmap.map.differing import differing_results
from shardmap.map.primitives import explicit_sharding
from shardmap.map.primitives.map_primitive import MapPrimitive, remove_axis
from shardmap.map.tracing import Body, bind_map, trace_body


@per_jaxpr
def _batch(
    jaxpr: Jaxpr,
    axis: Vmap,
    dims: tuple[int | None, ...],
    avals: tuple[Any, ...],
    axis_name: Hashable,
    axis_size: int,
) -> tuple[Body, tuple[bool, ...]]:
    """The batched body, and which of its results are batched, at 0.

    ``dims`` and ``avals`` are those of an element's batched operands.
    """
    mapped = tuple(dim is not None for dim in dims)
    batched = differing_results(jaxpr, axis.name, mapped)
    out_dims = [0 if is_batched else None for is_batched in batched]
    batch = vectorized(jaxpr, axis, dims, out_dims)
    return trace_body(batch, avals, axis_name, axis_size), batched


def _batching_rule(
    primitive: MapPrimitive,
    vmap: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    call_jaxpr: Jaxpr,
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    **params: Param,
) -> tuple[list[Any], list[int | None]]:
    if vmap.spmd_name is not None:
        raise ValueError(
            f"jax.vmap of a map with spmd_axis_name={vmap.spmd_name!r} is not "
            "supported. Map that dimension by an outer spmap with mesh= and "
            f"mesh_axes={vmap.spmd_name!r} instead."
        )
    explicit_sharding.check_batch("a map", args, dims)
    # Both axes are counted in the array that has them; operands are not transposed.
    map_axes: list[int | None] = []
    element_dims: list[int | None] = []
    for dim, axis in zip(dims, in_axes, strict=True):
        if dim is None or axis is None:
            map_axes.append(axis)
            element_dims.append(dim)
        else:
            map_axes.append(axis + (dim <= axis))
            element_dims.append(dim - (axis < dim))
    avals = tuple(
        remove_axis(jax.typeof(arg), axis)
        for arg, axis in zip(args, map_axes, strict=True)
    )
    # If both axes have one name, collectives inside mean the map's.
    shadowed = vmap.name == params["axis_name"]
    body, batched = _batch(
        call_jaxpr,
        vmap._replace(name=None) if shadowed else vmap,
        tuple(element_dims),
        avals,
        params["axis_name"],
        params["axis_size"],
    )
    # Batched results have the batch at 0.
    result_axes = [
        axis + 1 if is_batched and axis is not None else axis
        for axis, is_batched in zip(out_axes, batched, strict=True)
    ]
    results = bind_map(body, args, map_axes, result_axes, params, primitive)
    out_dims = [0 if is_batched else None for is_batched in batched]
    return results, out_dims


def register(primitive: MapPrimitive) -> None:
    """Registers the rule of `jax.vmap`."""
    def_batching(primitive, functools.partial(_batching_rule, primitive))
