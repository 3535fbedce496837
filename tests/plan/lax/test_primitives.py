"""The primitives of `jax.lax` that have no public name are those that JAX binds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap._jax import primitives
from shardmap._jax.types import Primitive
from shardmap._jax.walk import equations
from shardmap.planning.lax import primitives as lax_primitives

X = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (module, name)
        for module in (primitives, lax_primitives)
        for name, value in vars(module).items()
        if isinstance(value, Primitive)
    ],
)
def test_every_primitive_has_a_name_of_its_own(module, name):
    others = [v for v in vars(module).values() if isinstance(v, Primitive)]
    assert sum(v is getattr(module, name) for v in others) == 1


@pytest.mark.parametrize(
    ("primitive", "use"),
    [
        (lax_primitives.SCATTER_SUB, lambda x: x.at[0].subtract(1.0)),
        (lax_primitives.TILE, lambda x: jnp.tile(x, (3, 1))),
        (lax_primitives.STACK, lambda x: jnp.stack([x, x, x])),
        (lax_primitives.SPLIT, lambda x: jnp.split(x, 2)),
        (
            lax_primitives.RANDOM_WRAP,
            lambda x: jax.random.wrap_key_data(np.zeros(2, np.uint32)),
        ),
        (
            lax_primitives.RANDOM_UNWRAP,
            lambda x: jax.random.key_data(jax.random.key(1)),
        ),
    ],
)
def test_other_uses_bind_the_same(primitive, use):
    found = [e.primitive for e in equations(jax.make_jaxpr(use)(jnp.asarray(X)))]
    assert primitive in found
