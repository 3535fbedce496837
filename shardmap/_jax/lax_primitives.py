"""Primitives of `jax.lax` without a public name, for the rules of plans."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, reshard

from shardmap._jax.primitives import equation_of, primitive_of
from shardmap._jax.types import AnyJaxpr, Params, Primitive

_SQUARE = np.zeros((2, 2), np.float32)
_PAIR = np.zeros(2, np.float32)

SPLIT = primitive_of("split", lambda x: lax.split(x, (1, 1)), _SQUARE)
STACK = primitive_of("stack", lambda x: jnp.stack([x, x]), _SQUARE)
TILE = primitive_of("tile", lambda x: jnp.tile(x, (2, 1)), _SQUARE)
UNSTACK = primitive_of("unstack", jnp.unstack, _SQUARE)
OPTIMIZATION_BARRIER = primitive_of(
    "optimization_barrier", lax.optimization_barrier, _SQUARE
)
MULHI = primitive_of("mulhi", lax.mulhi, np.int32(1), np.int32(1))
SCATTER_SUB = primitive_of(
    "scatter-sub", lambda x: jnp.asarray(x).at[np.array([0])].subtract(1.0), _PAIR
)
PIVOTS = primitive_of(
    "lu_pivots_to_permutation",
    lambda x: lax.linalg.lu_pivots_to_permutation(x, 2),
    np.zeros(2, np.int32),
)


def _reshard() -> Primitive:
    explicit = AbstractMesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    layout = NamedSharding(explicit, PartitionSpec())
    return primitive_of("reshard", lambda x: reshard(x, layout), _PAIR)


RESHARD = _reshard()
"""`jax.sharding.reshard`, under an Explicit mesh."""

NEWER: list[Primitive] = [
    getattr(p, name)
    for name in ("log2_p", "one_minus_square_p", "polynomial_p")
    if hasattr(p, name)
]
"""Elementwise primitives that JAX has from 0.12 on."""


def _custom_vmap() -> Primitive:
    @jax.custom_batching.custom_vmap
    def same(x: jax.Array) -> jax.Array:
        return x

    same.def_vmap(lambda size, batched, x: (x, batched[0]))
    return primitive_of("custom_vmap_call", same, np.float32(0))


CUSTOM_VMAP = _custom_vmap()


# Random keys


def _keys(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(seed)
    data = jax.random.key_data(key)
    return jax.random.wrap_key_data(data), jax.random.clone(key)


RANDOM_SEED, RANDOM_WRAP, RANDOM_UNWRAP, RANDOM_CLONE = (
    primitive_of(f"random_{name}", _keys, np.uint32(0))
    for name in ("seed", "wrap", "unwrap", "clone")
)


# Parameters


def linear_solve(params: Params, operands: int) -> tuple[AnyJaxpr, list[int]]:
    """The jaxpr that solves, and the numbers of the operands that it takes."""
    counts, jaxprs = params["const_lengths"], params["jaxprs"]
    first = counts.matvec + counts.vecmat
    behind = first + counts.solve + counts.transpose_solve
    numbers = [*range(first, first + counts.solve), *range(behind, operands)]
    return jaxprs.solve, numbers


# From JAX 0.12 on some primitives are written in terms of others, and all of them are
# equations of one.


def expansion(params: Params) -> Callable[..., Any] | None:
    """The function of operands that such an equation stands for; None of others."""
    inner: Any = params.get("_prim")
    expand = getattr(inner, "expand", None)
    if expand is None:
        return None
    return lambda *operands: expand(*jax.tree.unflatten(inner.in_tree, operands))


def _expandable() -> Primitive | None:
    with jax.disable_jit(False):
        [call] = jax.make_jaxpr(jnp.searchsorted)(_PAIR, _PAIR).jaxpr.eqns
    equation = call.params["jaxpr"].eqns[-1]
    if expansion(equation.params) is not None:
        return equation.primitive
    # JAX 0.10 and 0.11 have a loop there.
    equation_of("scan", jnp.searchsorted, _PAIR, _PAIR)
    return None


EXPANDABLE = _expandable()
