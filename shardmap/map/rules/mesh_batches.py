"""`jax.vmap` of a map with ``spmd_axis_name``: a batch along an axis of the map's mesh.

The batch is a map itself then, around the other and on the same mesh.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from shardmap._jax.effects import axes_used
from shardmap._jax.rules import Vmap
from shardmap._jax.types import Equation, Value
from shardmap.map.layout import check_inner_meshes
from shardmap.map.primitives.axis import UNNAMED, map_text
from shardmap.map.primitives.map_primitive import layout_text, remove_axis, spmap_p
from shardmap.map.primitives.rewriting import rewrite_jaxpr
from shardmap.map.tracing import Batch, Body, batched_results, trace_body


def batch_along_mesh(
    vmap: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    params: dict[str, Any],
) -> tuple[list[Any], list[int | None]]:
    """The batching rule of a map, where the vmap has ``spmd_axis_name``.

    Args:
      vmap: what is around.
      args: the operands.
      dims: where each has the batch.
      params: of the map's equation.

    Raises:
      ValueError: the map's mesh does not have these axes, or maps walk them already.
    """
    spmd_name, mesh = vmap.spmd_name, params["mesh"]
    mesh_axes = spmd_name if isinstance(spmd_name, tuple) else (spmd_name,)
    if unknown := [name for name in mesh_axes if name not in mesh.shape]:
        raise ValueError(
            f"jax.vmap with spmd_axis_name={unknown[0]!r} of {map_text(params)}: the "
            "map runs on a mesh with the axes "
            f"{dict(mesh.shape)}. Give spmap a mesh= that has {unknown[0]!r}, and "
            "others of its axes as mesh_axes=."
        )
    # Of a vmap without a name JAX has one of its own, which nothing can use.
    is_used = vmap.name in axes_used(params["call_jaxpr"].effects)
    batch = Batch(vmap.name if is_used else UNNAMED, vmap.size)
    avals = tuple(
        remove_axis(jax.typeof(arg), dim) for arg, dim in zip(args, dims, strict=True)
    )
    body, batched = _element_of_batch(
        tuple(sorted(params.items())), batch, mesh_axes, tuple(dims), avals
    )
    out_dims = [0 if is_batched else None for is_batched in batched]
    around = params | {
        "axis_name": batch.name,
        "axis_size": batch.size,
        "in_axes": (None,) * len(body.constants) + tuple(dims),
        "out_axes": tuple(out_dims),
        "call_jaxpr": body.jaxpr,
        "name": f"vmap({params['name']})",
        "mesh_axes": mesh_axes,
        "inner_axes": (),
        "batch_size": None,
    }
    check_inner_meshes(around)
    return spmap_p.bind(*body.constants, *args, **around), out_dims


# For the same map the same jaxpr, for which there is a program.
@functools.lru_cache(maxsize=1024)
def _element_of_batch(
    params: Sequence[tuple[str, Any]],
    batch: Batch,
    mesh_axes: Collection[str],
    dims: tuple[int | None, ...],
    avals: Sequence[Any],
) -> tuple[Body, tuple[bool, ...]]:
    """A map as the function of one element of a batch; which results are batched."""

    def element(*operands: Value) -> list[Any]:
        return spmap_p.bind(*operands, **_yielding(dict(params), mesh_axes))

    body = trace_body(element, avals, batch.name, batch.size)
    return body, batched_results(body.jaxpr, batch, dims)


def _yielding(params: dict[str, Any], mesh_axes: Collection[str]) -> dict[str, Any]:
    """The map, vectorised if it walks one of these axes though no array has its own.

    Such maps are those of `mesh_map` for mesh axes that it only binds.
    """

    def own(params: dict[str, Any]) -> dict[str, Any]:
        walked = set(params["mesh_axes"] or ()) & set(mesh_axes)
        if not walked or {*params["in_axes"], *params["out_axes"]} != {None}:
            return params
        vectorised = params | {"mesh_axes": ()}
        return vectorised | {"layout": layout_text(**vectorised)}

    def change(equation: Equation, shadowed: bool) -> Any:
        if equation.primitive is not spmap_p:
            return equation
        return equation.replace(params=own(equation.params))

    inside = rewrite_jaxpr(params["call_jaxpr"], None, change)
    return own(params) | {"call_jaxpr": inside}
