"""Covariances and attention over keys read what they are of once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, times_read
from tests.plan.plan_programs import reals

X, Y = reals(400, 6), reals(400, 5) * 3 - 2
ROWS = {0: (130, 67, 103, 100)}
Q, K, V = reals(3, 8), reals(400, 8), reals(400, 5)


def covariance(x):
    away = x - x.mean(0, keepdims=True)
    return away.T @ away / (len(x) - 1)


def cross(x, y):
    return (x - x.mean(0, keepdims=True)).T @ (y - y.mean(0, keepdims=True))


def correlation(x, y):
    x = x[:, :5]
    a, b = x - x.mean(0, keepdims=True), y - y.mean(0, keepdims=True)
    return (a * b).sum(0) / jnp.sqrt((a * a).sum(0) * (b * b).sum(0))


def of_vectors(x, y):
    """The centres are numbers."""
    a, b = x.sum(1), y[:, 0]
    a, b = a - a.mean(), b - b.mean()
    return a @ b / jnp.sqrt((a * a).sum() * (b * b).sum())


def whitened(x):
    """What needs the covariance comes later."""
    return (x - x.mean(0, keepdims=True)) @ jnp.linalg.cholesky(
        jnp.cov(x, rowvar=False)
    )


COVARIANCES = {
    "centred": (covariance, (X,), 1),
    "jnp.cov": (lambda x: jnp.cov(x, rowvar=False), (X,), 1),
    "jnp.corrcoef": (lambda x: jnp.corrcoef(x, rowvar=False), (X,), 1),
    "with its mean and variance": (
        lambda x: (x.mean(0), x.var(0), covariance(x)),
        (X,),
        1,
    ),
    "of two": (cross, (X, Y), 1),
    "elementwise": (correlation, (X, Y), 1),
    "of vectors": (of_vectors, (X, Y[:, :1]), 1),
    "of what is made of it": (lambda x: covariance(jnp.sin(x) * 2), (X,), 1),
    "whitened": (whitened, (X,), 2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", COVARIANCES)
def test_covariances_read_once(name):
    fun, args, reads = COVARIANCES[name]
    cuts = (ROWS,) * len(args)
    shard_plan = check_cut(fun, *args, in_slices=cuts, tolerance=1e-4)
    assert times_read(shard_plan) == reads


@pytest.mark.deep
def test_columns_are_cut_too():
    shard_plan = check_cut(covariance, X, in_slices={0: 4, 1: 2}, tolerance=1e-4)
    assert len(shard_plan.stages) == 2
    check_cut(lambda x: jnp.cov(x), X.T.copy(), in_slices={1: 3}, tolerance=1e-4)


def test_a_covariance_is_no_less_accurate_than_two_passes():
    x = np.random.default_rng(0).standard_normal((4096, 8)).astype(np.float32)
    x[1000:2000] += 10
    shard_plan = plan(covariance, x, in_slices={0: (1000, 24, 3000, 72)})
    whole = jax.jit(covariance)
    for offset in (0, 1e3, 1e4, -1e5):
        y = (x + offset).astype(np.float32)
        exact = np.cov(y.astype(np.float64), rowvar=False)
        errors = [np.abs(fun(y) - exact).max() for fun in (shard_plan.run, whole)]
        assert errors[0] <= 2 * errors[1] + 3e-6 * np.abs(exact).max()


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 3, axis=-1) @ v


def by_hand(q, k, v):
    logits = q @ k.T
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def keys_first(q, k, v):
    return v.T @ jax.nn.softmax(k @ q.T, axis=0)


def masked(q, k, v):
    seen = jnp.arange(len(k))[None] < jnp.array([[400], [150], [1]])
    return jax.nn.softmax(jnp.where(seen, q @ k.T, -jnp.inf), axis=-1) @ v


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [attention, by_hand, keys_first, masked])
def test_attention_reads_keys_and_values_once(fun):
    cuts = None, ROWS, ROWS
    shard_plan = check_cut(fun, Q, K, V, in_slices=cuts, tolerance=1e-5)
    assert times_read(shard_plan, slice(1, 3)) == 1
    # A shard for each piece, and one that puts them together.
    assert shard_plan.num_shards == 5


def test_attention_with_heads_and_batches():
    q, k, v = reals(2, 3, 4, 8), reals(2, 600, 4, 8), reals(2, 600, 4, 8)
    keys = {1: (100, 350, 150)}
    fun = jax.nn.dot_product_attention
    shard_plan = check_cut(fun, q, k, v, in_slices=(None, keys, keys), tolerance=1e-5)
    assert times_read(shard_plan, slice(1, 3)) == 1
    cuts = {0: 2, 1: 3}, {0: 2, 1: 3, 2: 2}, {0: 2, 1: 3, 2: 2}
    check_cut(fun, q, k, v, in_slices=cuts, tolerance=1e-5)


def test_large_logits_and_rows_without_keys():
    shard_plan = plan(masked, Q, K, V, in_slices=(None, ROWS, ROWS))
    for scale in (0.0, 30.0, 1e4):
        want = jax.jit(masked)(Q * scale, K, V)
        assert_same(shard_plan.run(Q * scale, K, V), want, tolerance=1e-4)

    def nothing_seen(q, k, v):
        seen = jnp.arange(len(k))[None] < jnp.array([[400], [0], [1]])
        return jax.nn.softmax(jnp.where(seen, q @ k.T, -jnp.inf), axis=-1) @ v

    found = plan(nothing_seen, Q, K, V, in_slices=(None, ROWS, ROWS)).run(Q, K, V)
    np.testing.assert_array_equal(
        np.isnan(found), [[False] * 5, [True] * 5, [False] * 5]
    )


@pytest.mark.deep
def test_gradients_of_both():
    def loss(q, k, v):
        return (attention(q, k, v) ** 2).sum() + covariance(v).std()

    fun = jax.grad(loss, (0, 1, 2))
    check_cut(fun, Q, K, V, in_slices=(None, ROWS, ROWS), tolerance=1e-4)


@pytest.mark.deep
def test_what_would_keep_more_than_it_reads_takes_two_passes():
    # As many queries as keys: their sums of all pieces are larger than the keys.
    q = reals(400, 8)
    shard_plan = check_cut(
        attention, q, K, V, in_slices=(None, ROWS, ROWS), tolerance=1e-5
    )
    assert times_read(shard_plan, slice(1, 3)) == 2
    assert max(cost.kept_bytes for cost in shard_plan.stage_costs) < 100_000
