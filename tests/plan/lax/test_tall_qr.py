"""QR, singular values and least squares of matrices whose rows are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

TALL = reals(29, 3)
SIDE = reals(29, 2)


def svd(x):
    return jnp.linalg.svd(x, full_matrices=False)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [
        jnp.linalg.qr,
        svd,
        lambda x: jnp.linalg.svd(x, compute_uv=False),
        lambda x: jnp.linalg.pinv(x),
    ],
)
def test_pieces_of_rows(fun):
    shard_plan = plan(fun, TALL, in_slices=({0: (8, 2, 9, 10)},))
    assert_same(shard_plan.run(TALL), jax.jit(fun)(TALL), 1e-5)
    assert shard_plan.stages[0].num_shards == 3


def test_least_squares():
    def fun(x, y):
        return jnp.linalg.lstsq(x, y)

    shard_plan = plan(fun, TALL, SIDE, in_slices=({0: 4}, {0: 4}))
    assert_same(shard_plan.run(TALL, SIDE), jax.jit(fun)(TALL, SIDE), 1e-4)
    assert shard_plan.stages[0].num_shards == 4


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("seed", range(3))
def test_the_signs_are_those_of_reflections(seed, dtype):
    x = np.random.default_rng(seed).normal(size=(20, 5, 2)) @ np.array([1, 1j])
    x = (x if dtype == np.complex64 else x.real).astype(dtype)
    shard_plan = plan(jnp.linalg.qr, x, in_slices=({0: 2},))
    q, r = shard_plan.run(x)
    want = np.linalg.qr(x)
    np.testing.assert_allclose(q, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(r, want[1], rtol=1e-4, atol=1e-5)
    assert shard_plan.stages[0].num_shards == 2


def test_what_is_not_tall_is_whole():
    for x in (reals(8, 6), reals(2, 9, 3)):
        shard_plan = plan(svd, x, in_slices=({x.ndim - 2: 2},))
        assert shard_plan.num_shards == 1
    whole = plan(jnp.linalg.svd, TALL, in_slices=({0: 2},))
    assert whole.num_shards == 1
    assert "works on the whole of this axis" in str(whole.explain())


@examples(2)
@given(st.data())
def test_the_gradient_in_any_pieces(data):
    def fun(x):
        q, r = jnp.linalg.qr(x)
        return (jnp.sin(q) ** 2).sum() + (r * r * r).sum()

    gradient = jax.grad(fun)
    shard_plan = plan(gradient, TALL, in_slices=data.draw(cuts((TALL,))))
    assert_same(shard_plan.run(TALL), jax.jit(gradient)(TALL), 1e-3)


def test_a_fitted_line_is_not_kept_for_all_rows():
    def detrended(y):
        line = jnp.stack([jnp.arange(400.0) / 400, jnp.ones(400)], 1)
        return y - line @ jnp.linalg.lstsq(line, y)[0]

    y = reals(400, 64)
    shard_plan = check_cut(detrended, y, in_slices={0: 8}, tolerance=1e-3)
    assert [stage.num_shards for stage in shard_plan.stages] == [8, 8]
    assert shard_plan.peak_bytes < y.nbytes / 2
    assert "functions compiled" not in str(shard_plan)


def test_a_product_is_cut_along_its_rows():
    x, w = reals(400, 64), reals(64, 3)
    shard_plan = check_cut(
        lambda x, w: jnp.linalg.svd(x @ w, compute_uv=False),
        *(x, w),
        in_slices=({0: 8}, None),
        tolerance=1e-3,
    )
    assert [stage.num_shards for stage in shard_plan.stages] == [8, 1]
    assert shard_plan.peak_bytes < x.nbytes / 4
