"""Random bits: the same as of the whole call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import KEY, X, reals

SHAPES = np.abs(reals(7, 4)) + np.float32(0.3)
DRAWN = {
    "poisson": lambda key: jax.random.poisson(key, 5.0, (7, 4)),
    "binomial": lambda key: jax.random.binomial(key, 20.0, 0.3, (7, 4)),
    "categories": lambda key: jax.random.categorical(key, SHAPES[0], shape=(7, 3)),
    "truncated": lambda key: jax.random.truncated_normal(key, -1.0, 2.0, (7, 4)),
}


@pytest.mark.parametrize(
    "name",
    ["poisson", *(pytest.param(n, marks=pytest.mark.deep) for n in [*DRAWN][1:])],
)
def test_a_piece_of_what_is_drawn_has_the_same_bits(name):
    key = jax.random.key(3)
    shard_plan = plan(DRAWN[name], key, out_slices={0: (2, 5)})
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (2, 1)
    np.testing.assert_array_equal(shard_plan.run(key), jax.jit(DRAWN[name])(key))


@pytest.mark.deep
def test_gamma_draws_are_whole_but_for_keys_of_their_own():
    def of_one(key, a):
        return jax.random.gamma(key, a, a.shape)

    def of_each(keys, a):
        return jax.vmap(lambda key: jax.random.gamma(key, a, (4,)))(keys)

    key = jax.random.key(3)
    shard_plan = plan(of_one, key, SHAPES, in_slices=(None, {0: (2, 5)}))
    assert shard_plan.num_shards == 1
    assert "draw with a key for each row" in str(shard_plan.explain())
    args = jax.random.split(key, 6), np.float32(1.4)
    shard_plan = check_cut(
        of_each, *args, in_slices=({0: (1, 5)}, None), tolerance=1e-4
    )
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (2, 1)


def test_what_is_drawn_at_once_is_told():
    def fun(key, x):
        return jax.random.uniform(key, x.shape) + x

    args = jax.random.key(0, impl="rbg"), X
    shard_plan = plan(fun, *args, in_slices=(None, {0: 2}))
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args))
    text = str(shard_plan.explain())
    assert "draws all of random_bits" in text
    assert "this generator makes all its bits at once" in text
    large = jax.ShapeDtypeStruct((2**17, 2**16), np.float32)
    many = plan(fun, jax.random.key(0), large, in_slices=(None, {0: 2}))
    assert "more than 2**32 numbers are drawn with one key" in str(many.explain())
    few = plan(fun, jax.random.key(0), X, in_slices=(None, {0: 2}))
    assert "at once" not in str(few.explain())


def bootstrap(key, x):
    """The deviation of means of samples."""
    places = jax.vmap(lambda k: jax.random.uniform(k, (100,)) * len(x))
    places = places(jax.random.split(key, 400)).astype(jnp.int32)
    return x[places].mean(1).std()


SUMS_OF_NOISE = {
    "bootstrap": (bootstrap, (KEY, reals(100))),
    "places": (lambda x: (jnp.arange(200_000.0) * x).sum(), (np.float32(1e-4),)),
}


@pytest.mark.parametrize(
    "name", [pytest.param("bootstrap", marks=pytest.mark.deep), "places"]
)
def test_cuts_begin_at_random_numbers_that_do_not_fit(name):
    fun, args = SUMS_OF_NOISE[name]
    shard_plan = plan(fun, *args, memory="200 kB")
    assert shard_plan.num_shards > 1
    assert shard_plan.peak_bytes <= 200_000
    want = jax.jit(fun)(*args)
    assert_same(shard_plan.run(*args), want, tolerance=1e-3)
    assert_same(sm.chunked(fun, memory="200 kB")(*args), want, tolerance=1e-3)


@pytest.mark.deep
def test_cuts_that_begin_inside_are_differentiated():
    def loss(shift, key):
        return ((jax.random.normal(key, (10_000,)) + shift) ** 2).mean()

    cut = sm.chunked(loss, memory="40 kB")
    shift = jnp.float32(0.5)
    assert_same(jax.grad(cut)(shift, KEY), jax.grad(loss)(shift, KEY), 1e-3)


def test_cuts_that_begin_inside_stand_beside_axes_that_are_auto():
    def fun(key, x):
        return x.sum(), jax.random.normal(key, (14_001,)).max()

    x = np.ones(10_003, np.float32)
    shard_plan = plan(fun, KEY, x, in_slices=(None, {0: sm.AUTO}), memory="20 kB")
    assert shard_plan.peak_bytes <= 20_000
    assert_same(shard_plan.run(KEY, x), jax.jit(fun)(KEY, x))
