"""Rewrites of collectives, for JAX's rules and for XLA."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p
import jax.numpy as jnp
import numpy as np

from shardmap._jax.collectives import REDUCE_SCATTER
from shardmap._jax.types import Atom, Equation, Jaxpr, aval_of, with_shape
from shardmap._jax.walk import equations_for, rewrite_jaxpr
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import is_no_map


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

    def change(equation: Equation) -> Any:
        narrow = [_is_narrow(atom) for atom in equation.invars]
        collective = COLLECTIVES.get(equation.primitive)
        if collective is None or not (collective.combiner and any(narrow)):
            return equation
        invars: list[Any]
        outvars: list[Any]
        invars, outvars = (
            [_wide(a) if n else a for a, n in zip(atoms, narrow, strict=True)]
            for atoms in (equation.invars, equation.outvars)
        )
        return [
            *_converted(equation.invars, invars, equation),
            equation.replace(invars=invars, outvars=outvars),
            *_converted(outvars, equation.outvars, equation),
        ]

    return rewrite_jaxpr(jaxpr, change)


def _is_narrow(atom: Atom) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.bfloat16


def _wide(atom: Atom) -> Any:
    return jex_core.Var(jax.core.ShapedArray(aval_of(atom).shape, np.dtype(np.float32)))


def _converted(
    sources: Sequence[Any], targets: Sequence[Any], like: Equation
) -> list[Any]:
    """The equations that convert to the dtypes of other variables."""
    return [
        equation
        for source, target in zip(sources, targets, strict=True)
        if source is not target
        for equation in equations_for(
            lambda x, dtype=target.aval.dtype: x.astype(dtype),
            [source],
            [target],
            like,
        )
    ]
