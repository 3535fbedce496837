"""Variances, softmax and places of extrema read what they are of once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, times_read
from tests.plan.plan_programs import reals

X = reals(160, 6)


def standardised(x):
    return (x - x.mean(0, keepdims=True)) / (x.std(0, keepdims=True) + 1)


def around(x, y):
    """The centre is another one's."""
    return ((x - y.max(0, keepdims=True)) ** 2).sum(0)


def product_with_itself(x):
    away = x.mean(0, keepdims=True) - x
    return (away * away).sum(0)


CASES = {
    "variance": (lambda x: x.var(0), 1),
    "deviation of all": (lambda x: jnp.std(x, ddof=1), 1),
    "mean and variance": (lambda x: (x.mean(0), x.var(0)), 1),
    "standardised": (standardised, 2),
    "a product with itself": (product_with_itself, 1),
    "around one number": (lambda x: ((x - x.mean()) ** 2).sum(), 1),
    "exponentials around one number": (lambda x: jnp.exp(x - x.max()).sum(), 1),
    "softmax": (lambda x: jax.nn.softmax(x, 0), 2),
    "log-softmax": (lambda x: jax.nn.log_softmax(x, 0), 2),
    "log-sum-exp": (lambda x: jax.nn.logsumexp(x, 0), 1),
    "log-sum-exp of all": (jax.nn.logsumexp, 1),
    "argmax": (lambda x: jnp.argmax(x, 0), 1),
    "argmax with its value": (lambda x: (jnp.argmax(x, 0), x.max(0)), 1),
    "argmin of all": (jnp.argmin, 1),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_it_is_read_as_often_as_it_must_be(name):
    fun, reads = CASES[name]
    cut = {0: (50, 7, 63, 40), 1: 2}
    shard_plan = check_cut(fun, X, in_slices=(cut,), tolerance=1e-5)
    assert times_read(shard_plan) == reads


def test_the_centre_may_be_any():
    y = reals(160, 6) * 3 + 5
    shard_plan = check_cut(around, X, y, in_slices=({0: 4}, {0: 4}), tolerance=1e-5)
    assert times_read(shard_plan) == 1


@pytest.mark.deep
def test_it_is_no_less_accurate_than_two_passes():
    def fun(x):
        return x.mean(0), x.var(0)

    x = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    # Pieces with means of their own.
    x[1000:2000] += 10
    shard_plan, whole = (
        plan(fun, x, in_slices=({0: (1000, 24, 3000, 72)},)),
        jax.jit(fun),
    )
    for offset in (0, 1e3, 1e4, 1e6, -1e4):
        y = (x + offset).astype(np.float32)
        # A column that is all the same.
        y[:, 0] = np.float32(offset + 0.1)
        exact = y.astype(np.float64)
        got, want = shard_plan.run(y), whole(y)
        assert (got[1] >= 0).all()
        for ours, theirs, true in zip(
            got, want, (exact.mean(0), exact.var(0)), strict=True
        ):
            off = np.abs(np.asarray(ours, np.float64) - true)
            bound = np.abs(np.asarray(theirs, np.float64) - true)
            assert off.max() <= 2 * bound.max() + 4e-7 * np.abs(true).max()


def test_exponentials_neither_overflow_nor_vanish():
    def fun(x):
        return jax.nn.softmax(x, 0), jax.nn.logsumexp(x, 0)

    shard_plan = plan(fun, X, in_slices=({0: 4},))
    for offset in (0, 1e4, -1e4):
        x = (X * 40 + offset).astype(np.float32)
        x[:40] -= 500
        assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-5)


def test_what_is_not_finite_gives_the_same():
    def fun(x):
        return (
            (x.var(0), jax.nn.softmax(x, 0), jax.nn.logsumexp(x, 0)),
            (jnp.argmax(x, 0), x.max(0)),
        )

    shard_plan, whole = plan(fun, X, in_slices=({0: 4},)), jax.jit(fun)
    for odd in (np.inf, -np.inf, np.nan):
        for rows in (slice(3, 4), slice(40, 80), slice(None)):
            x = X.copy()
            x[rows, 1] = odd
            for ours, theirs in zip(
                jax.tree.leaves(shard_plan.run(x)),
                jax.tree.leaves(whole(x)),
                strict=True,
            ):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_exponentials_around_minus_infinity_are_nan():
    def fun(x):
        around = jnp.exp(x - x.max(0, keepdims=True))
        return around.sum(0), around.T @ jnp.ones(160)

    x = X.copy()
    x[:40, 0] = x[:, 1] = -np.inf
    shard_plan = plan(fun, x, in_slices={0: 4})
    assert times_read(shard_plan) == 1
    assert_same(shard_plan.run(x), jax.jit(fun)(x), 1e-5)


def test_of_equal_elements_the_first_one_is_found():
    x = np.zeros((160, 3), np.float32)
    x[[50, 90, 150], 1] = 2
    x[[130, 131], 2] = -1
    for fun in (lambda x: jnp.argmax(x, 0), lambda x: jnp.argmin(x, 0)):
        shard_plan = plan(fun, x, in_slices=({0: 4},))
        np.testing.assert_array_equal(shard_plan.run(x), fun(x))


def test_small_pieces_are_left_as_they_are():
    shard_plan = check_cut(lambda x: x.var(0), X, in_slices=({0: 80},), tolerance=1e-5)
    assert times_read(shard_plan) == 2


def test_statistics_of_many_kinds_take_two_passes():
    def fun(x):
        return x.var(0), jax.nn.logsumexp(x, 0), jnp.argmax(x, 0)

    shard_plan = check_cut(fun, X, in_slices=({0: 4},), tolerance=1e-5)
    assert times_read(shard_plan) == 2


@pytest.mark.deep
def test_two_values_of_one_shape_are_told_apart():
    def fun(x, y):
        return x.var(0) + y.sum(0), jax.nn.logsumexp(y, 0) - x.max(0)

    y = reals(160, 6) * 2
    check_cut(fun, X, y, in_slices=({0: 4}, {0: (9, 151)}), tolerance=1e-5)


def test_whole_numbers_and_wide_ones():
    x = np.arange(480, dtype=np.int32).reshape(160, 3) % 7
    fun = CASES["mean and variance"][0]
    check_cut(fun, x, in_slices=({0: 4},), tolerance=1e-5)
    with jax.enable_x64(True):
        check_cut(fun, X.astype(np.float64), in_slices=({0: 4},), tolerance=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("length", "more"), [(10, ()), (30, (jnp.argmin, jnp.var, jax.nn.logsumexp))]
)
def test_an_argmax_of_computed_floats_is_found(length, more):
    """A second pass may compute other last bits, and find no such number."""

    def fun(x, w):
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        w = w / jnp.linalg.norm(w, axis=1, keepdims=True)
        y = x @ w.T
        return [each(y, 1) for each in (jnp.argmax, *more)]

    args = reals(75, 9), reals(131, 9, seed=1)
    shard_plan = plan(fun, *args, in_slices=(None, {0: sm.Pieces(length)}))
    first = shard_plan.shards[0]
    assert "argmax" in str(jax.make_jaxpr(first.function)(*first.args(*args)))
    found = shard_plan.run(*args)
    assert (found[0] == jax.jit(fun)(*args)[0]).mean() > 0.95
    assert all(each.max() < 131 for each in found[:2])
