"""Rewrites of collectives: names of axes, and forms for JAX's rules and for XLA."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p
import jax.numpy as jnp
import numpy as np

from shardmap._jax.collectives import (
    REDUCE_SCATTER,
    axis_names,
    named_axes,
    with_axis_names,
)
from shardmap._jax.effects import axis_of, with_axis
from shardmap._jax.types import AnyMesh, Equation, Jaxpr, aval_of, with_shape
from shardmap._jax.walk import equations_for, rewrite_jaxpr
from shardmap.map.collectives.rules import permutation_in_order
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import binds, is_no_map, spmap_p


def tiled(equation: Equation) -> Any:
    """An all_to_all or psum_scatter as a tiled one; others as they are.

    Without ``tiled``, JAX's transpose of an all_to_all that moves a dimension is wrong,
    and so is its batching of a psum_scatter behind the scattered dimension.
    """
    params = equation.params
    if params.get("tiled", True):
        return equation
    changed = equation.replace(params=params | {"tiled": True})
    if equation.primitive is p.all_to_all_p:
        # `jax.lax.all_to_all` has made the dimensions those of a tiled one.
        return changed
    if equation.primitive is not REDUCE_SCATTER:
        return equation
    dimension = params["scatter_dimension"]
    (result,) = equation.outvars
    aval = aval_of(result)
    shape = list(aval.shape)
    shape.insert(dimension, 1)
    between = jex_core.Var(with_shape(aval, shape))
    squeeze = equations_for(
        lambda x: jax.lax.squeeze(x, (dimension,)), [between], [result], equation
    )
    return [changed.replace(outvars=[between]), *squeeze]


def tile_collectives(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` with all_to_all and psum_scatter tiled; see `tiled`."""
    # Maps inside were rewritten when they were traced.
    return rewrite_jaxpr(jaxpr, tiled, is_no_map)


def upcast_bfloat16_reductions(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` with reductions of bfloat16 in float32.

    XLA's CPU compiler aborts at a reduction of bfloat16 between devices if only some
    mesh axes are manual.
    """

    def wide(atoms: Sequence[Any]) -> list[Any]:
        float32 = np.dtype(np.float32)
        return [
            jex_core.Var(jax.core.ShapedArray(a.aval.shape, float32)) for a in atoms
        ]

    def converted(sources: Sequence[Any], targets: Sequence[Any], like: Any) -> Any:
        dtypes = [aval_of(target).dtype for target in targets]
        return equations_for(
            lambda *values: [v.astype(d) for v, d in zip(values, dtypes, strict=True)],
            sources,
            targets,
            like,
        )

    def change(equation: Equation) -> Any:
        collective = COLLECTIVES.get(equation.primitive)
        avals = list(map(aval_of, equation.invars))
        if (
            collective is None
            or not collective.combiner
            or any(getattr(aval, "dtype", None) != jnp.bfloat16 for aval in avals)
        ):
            return equation
        invars, outvars = wide(equation.invars), wide(equation.outvars)
        return [
            *converted(equation.invars, invars, equation),
            equation.replace(invars=invars, outvars=outvars),
            *converted(outvars, equation.outvars, equation),
        ]

    return rewrite_jaxpr(jaxpr, change)


@dataclasses.dataclass(frozen=True)
class _RenamedAxis:
    """The new name of a map's axis that is called like a mesh axis."""

    name: Hashable

    def __repr__(self) -> str:
        return repr(self.name)


def rename_axis(jaxpr: Jaxpr, old: Hashable, new: Hashable) -> Any:
    """``jaxpr`` whose collectives over ``old`` are over ``new``."""

    def change(equation: Equation) -> Any:
        if old not in named_axes(equation):
            return equation
        names = axis_names(equation.params)
        renamed = tuple(new if name == old else name for name in names)
        effects = {
            with_axis(effect, new) if axis_of(effect) == old else effect
            for effect in equation.effects
        }
        return equation.replace(
            params=with_axis_names(equation.params, renamed), effects=effects
        )

    if new == old:
        return jaxpr
    return rewrite_jaxpr(jaxpr, change, lambda equation: not binds(equation, old))


def for_mesh(
    axis_name: Hashable, jaxpr: Jaxpr, mesh: AnyMesh, mesh_axis: str | None = None
) -> tuple[Hashable, Any]:
    """A map's axis name and jaxpr, ready for the devices of a mesh.

    No map keeps the name of a mesh axis: it would hide collectives over that mesh axis.
    Permutations name mesh axes in the mesh's order.

    Args:
      axis_name: the map's axis name.
      jaxpr: the function of one element.
      mesh: the devices.
      mesh_axis: the mesh axis with one element on each device, if there is one. The
        map's axis gets its name.
    """

    def unshadowing(name: Hashable) -> Hashable:
        return _RenamedAxis(name) if name in mesh.axis_names else name

    def change(equation: Equation) -> Any:
        if equation.primitive is not spmap_p:
            return equation
        params = equation.params
        new = unshadowing(params["axis_name"])
        body = rename_axis(params["call_jaxpr"], params["axis_name"], new)
        return equation.replace(params=params | {"axis_name": new, "call_jaxpr": body})

    new = mesh_axis or unshadowing(axis_name)
    jaxpr = rename_axis(rewrite_jaxpr(jaxpr, change), axis_name, new)
    return new, in_mesh_order(jaxpr, mesh)


def in_mesh_order(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr`` whose permutations name mesh axes in the order of the mesh.

    JAX numbers devices in the order of the mesh, whatever the order of the names.
    """

    def change(equation: Equation) -> Any:
        if equation.primitive is not p.ppermute_p:
            return equation
        names = axis_names(equation.params)
        if not set(names) <= set(mesh.shape):
            return equation
        sizes = [mesh.shape[name] for name in names]
        pairs = equation.params["perm"]
        names, pairs = permutation_in_order(names, sizes, pairs, mesh.axis_names)
        return equation.replace(
            params=equation.params | {"axis_name": names, "perm": pairs}
        )

    # The bodies of maps are put in order when these are lowered.
    return rewrite_jaxpr(jaxpr, change, is_no_map)
