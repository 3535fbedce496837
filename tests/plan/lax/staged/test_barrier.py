"""Cuts that begin at results and inside a function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from shardmap.units import AUTO
from tests.plan.checks import assert_same, cuts
from tests.plan.plan_programs import X, reals
from tests.strategies import examples

KEY = jax.random.key(4)


def check(fun, *args, out_slices, in_slices=None, tolerance=2e-5):
    shard_plan = plan(fun, *args, in_slices=in_slices, out_slices=out_slices)
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args), tolerance)
    return shard_plan


def test_what_is_made_of_no_array_is_made_in_pieces():
    shard_plan = check(
        lambda key: jax.random.normal(key, (9, 4)), KEY, out_slices={0: (2, 4, 3)}
    )
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (3, 1)
    assert shard_plan.out_slices == {0: [(0, 2), (2, 6), (6, 9)]}
    shard_plan = check(lambda: jnp.linspace(0.0, 1.0, 11), out_slices={0: 3})
    assert shard_plan.num_shards == 3


def test_results_of_a_tree():
    def fun(key, x):
        return {"a": jax.random.uniform(key, (7,)), "b": x @ x.T}

    shard_plan = check(
        fun, KEY, X, out_slices={"a": {0: 2}, "b": {1: (3, 5)}}, tolerance=1e-4
    )
    assert shard_plan.num_shards == 4


def test_cuts_of_arguments_and_of_results_meet():
    def fun(x):
        return (x * 2).sum(0), x.T

    shard_plan = check(fun, X, in_slices=({0: 2},), out_slices=({0: 3}, {1: (3, 5)}))
    assert shard_plan.out_slices[1][1] == [(0, 3), (3, 4), (4, 8)]


@examples(3)
@given(st.data())
def test_the_gradient_in_any_pieces(data):
    w = reals(6, 4)

    def fun(w, x):
        return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    [out] = data.draw(cuts((w,)))
    [_, inner] = data.draw(cuts((w, X)))
    check(fun, w, X, in_slices=(None, inner), out_slices=out, tolerance=1e-4)


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match=r"cannot cut results of .* out_slices takes"):
        plan(jnp.sin, X, out_slices={3: 2})
    with pytest.raises(ValueError, match=r"out_slices is a tuple of 1, but stands for"):
        plan(lambda x: (x, x), X, out_slices=(None,))
    with pytest.raises(ValueError, match="out_slices cannot be AUTO: give a number"):
        plan(jnp.sin, X, out_slices={0: AUTO}, memory="1 MB")


def test_a_result_of_a_literal_or_an_argument():
    def fun(x):
        return x, 1.0, jnp.ones(3)

    shard_plan = check(fun, np.ones(6, np.float32), out_slices=({0: 2}, None, {0: 3}))
    assert shard_plan.num_shards == 5


DRAWN = {
    "median": (jnp.median, 50_000),
    "cumsum": (lambda x: jnp.cumsum(x).max(), 20_000),
    "singular": (
        lambda x: jnp.linalg.svd(x.reshape(-1, 4), compute_uv=False),
        20_000,
    ),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)).max(), 57_000),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("fun", "memory"), DRAWN.values(), ids=DRAWN)
def test_random_numbers_are_drawn_in_pieces_for_what_is_cut_in_stages(fun, memory):
    def drawn(key):
        return fun(jax.random.normal(key, (4000,)))

    shard_plan = plan(drawn, KEY, memory=memory)
    whole = plan(drawn, KEY, in_slices={})
    assert shard_plan.peak_bytes <= memory < whole.peak_bytes / 2.8
    assert_same(shard_plan.run(KEY), jax.jit(drawn)(KEY), 1e-4)


def test_the_gradient_of_a_result_that_is_drawn_in_pieces():
    def drawn(scale):
        return jax.random.normal(KEY, (8_000,)) * scale

    def loss(fun):
        return lambda scale: (fun(scale) ** 2).sum()

    in_pieces = chunked(drawn, memory=80_000)
    scale = jnp.float32(2.0)
    assert_same(jax.grad(loss(in_pieces))(scale), jax.grad(loss(drawn))(scale), 1e-4)
