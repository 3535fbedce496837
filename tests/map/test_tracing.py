"""Functions as the jaxprs that maps carry, and what their vectorisation makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.map_programs import assert_same, both_lowerings, same_under_vmap, spread

ROWS = spread((4, 3))


@pytest.mark.few(1)
@both_lowerings
def test_closed_over_arrays(spmap):
    elsewhere = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    host = np.arange(3, dtype=np.float32)
    expected = jnp.asarray(ROWS * host + host)
    mapped = spmap(lambda x: x * elsewhere + host)
    assert_same(mapped(ROWS), expected)
    assert_same(jax.jit(mapped)(ROWS), expected)
    assert_same(jax.vmap(mapped)(ROWS[None]), expected[None])


@pytest.mark.few(1)
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.jacfwd])
def test_closed_over_tracers(transform):
    def build(map_):
        def fun(w):
            mapped = map_(lambda x: lax.psum(jnp.sin(x * w), "i") * x, axis_name="i")
            return (mapped(ROWS) ** 2).sum()

        return transform(fun)

    same_under_vmap(build, ROWS[0])


def test_closed_over_results_of_another_map():
    def build(map_):
        def fun(x, w):
            scaled = map_(lambda x: x * w)(x)
            again = map_(lambda y: y * lax.psum(scaled.sum() * y, "i"), axis_name="i")
            return again(x).sum()

        return jax.grad(fun, (0, 1))

    same_under_vmap(build, ROWS, ROWS[0], compiled=False)
