"""Equations that run at once: on which devices, and how long their programs live."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm

X = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_what_a_short_map_returned_is_transformed_and_compiled_where_it_is(count):
    x = X[:count] + 1
    mapped = sm.spmap(lambda v: v * jax.lax.psum(v, "i"), "i")
    y = mapped(x)

    def loss(v):
        return mapped(jnp.sin(v)).sum()

    gradient = jax.grad(lambda v: jnp.sin(v).sum() ** 2)(x * x.sum())
    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss))):
        result = transformed(y)
        np.testing.assert_allclose(result, gradient, rtol=1e-5)
        assert result.sharding.device_set == y.sharding.device_set
    once = y * y.sum()
    np.testing.assert_allclose(jax.jit(mapped)(y), once, rtol=1e-6)
    twice = jax.jit(lambda v: mapped(mapped(v)))(y)
    np.testing.assert_allclose(twice, once * once.sum(), rtol=1e-6)


def test_numpy_arrays_go_where_the_argument_beside_them_is():
    few = jax.devices()[:2]
    mapped = sm.spmap(lambda v, w: v * w, in_axes=(0, None))
    y = mapped(X[:2], X[3])
    assert y.sharding.device_set == {*few}
    pairs = sm.spmap(lambda v, w: v * w)
    # A map of NumPy arrays alone says by itself where it is.
    sines = sm.spmap(jnp.sin, devices=few)
    results = jax.jit(lambda v, x, w: (mapped(v, w), pairs(x[:2], v), sines(x)))(
        y, X, X[3]
    )
    for result, expected in zip(results, (y * X[3], y * X[:2], np.sin(X)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)
        assert result.sharding.device_set == {*few}


@pytest.mark.usefixtures("young_heap")
def test_programs_of_eager_transformations_are_freed_with_their_function():
    client = jax.devices()[0].client

    def live():
        gc.collect()
        return len(client.live_executables())

    def transformed(k):
        mapped = sm.spmap(lambda v: jnp.sin(v) * k)
        jax.grad(lambda v: mapped(v).sum())(X).block_until_ready()
        jax.vmap(mapped)(X[None]).block_until_ready()

    transformed(0)
    before = live()
    for k in range(4):
        transformed(k + 1)
    assert live() == before
