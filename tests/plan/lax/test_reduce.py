"""Reductions and contractions in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.plan_programs import X, conv, reals


def test_integers_are_exact_in_parts():
    x = np.random.default_rng(0).integers(-(2**31), 2**31, (64,), np.int32)
    for fun in (jnp.sum, jnp.prod, jnp.max, jnp.argmin):
        shard_plan = plan(fun, x, in_slices=({0: 7},))
        assert shard_plan.run(x) == fun(x)
        assert shard_plan.num_shards > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [jnp.argmax, jnp.argmin])
def test_the_first_of_booleans(fun):
    for x in (X > 0.5, X > 9, X < 9):
        shard_plan = plan(lambda x: fun(x, 0), x, in_slices=({0: (3, 5)},))
        np.testing.assert_array_equal(shard_plan.run(x), fun(x, 0))
        assert shard_plan.num_shards > 1


def test_places_that_no_int32_says_are_not_looked_for_in_pieces():
    for size, shards in ((2**31 - 1, 9), (2**31 + 10, 1)):
        x = jax.ShapeDtypeStruct((size,), jnp.int8)
        shard_plan = plan(lambda x: jax.lax.argmax(x, 0, np.int32), x, in_slices={0: 8})
        assert shard_plan.num_shards == shards
    assert "its places do not fit into the type of its result (lax.argmax" in str(
        shard_plan
    )


def descended(x, v):
    return jax.lax.fori_loop(0, 3, lambda _, w: w - x.T @ (x @ w - v), X[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [lambda x, v: x.T @ v, lambda x, v: v @ x, descended])
def test_a_product_of_a_transposed_matrix_copies_none(fun):
    x, v = reals(12, X.shape[1]), reals(12, seed=3)
    shard_plan = plan(fun, x, v, in_slices=({0: 4}, {0: 4}))
    assert shard_plan.num_shards > 2
    cut = jax.jit(chunked(fun, ({0: 4}, {0: 4})))
    assert "transpose" not in cut.lower(x, v).as_text()
    np.testing.assert_allclose(shard_plan.run(x, v), jax.jit(fun)(x, v), rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: jnp.swapaxes(x, 1, 2) @ y,
        lambda x, y: jnp.tensordot(x.transpose(2, 0, 1), y.transpose(1, 2, 0), 1),
        lambda x, y: jnp.tensordot(x.T, y, ((2, 1), (0, 1))),
        lambda x, y: jnp.einsum("bij,bik->kbj", x, y.transpose(1, 0, 2).swapaxes(0, 1)),
    ],
)
def test_products_of_transposed_arrays(fun):
    x, y = reals(4, 6, 8), reals(4, 6, 8, seed=5)
    want = jax.jit(fun)(x, y)
    for cut in ({0: 2}, {1: 3}, {2: 4}):
        shard_plan = plan(fun, x, y, in_slices=(cut, cut))
        np.testing.assert_allclose(shard_plan.run(x, y), want, rtol=1e-5, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: x @ y,
        lambda x, y: jnp.einsum("ij,jk->ki", x, y),
        lambda x, y: jax.lax.reduce_sum(x, (1,)),
        lambda x, y: conv(x[None, None], y[None, None], padding="VALID"),
        lambda x, y: jnp.dot(x, y, precision="highest"),
    ],
)
def test_sums_of_half_precision_are_rounded_once(fun, dtype):
    x = (reals(6, 96) * 30).astype(dtype)
    y = reals(96, 5, seed=9).astype(dtype)
    shard_plan = plan(fun, x, y, in_slices=({1: 32}, None))
    want = jax.jit(fun)(x.astype(np.float32), y.astype(np.float32))
    got = shard_plan.run(x, y)
    assert got.dtype == dtype
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        got.astype(np.float32), np.asarray(want), rtol=spacing, atol=1e-4
    )
    assert shard_plan.num_shards > 32
