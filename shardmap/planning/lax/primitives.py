"""Primitives of `jax.lax` without a public name, for the rules of plans."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, reshard

from shardmap._jax.primitives import primitive_of
from shardmap._jax.types import Primitive

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
