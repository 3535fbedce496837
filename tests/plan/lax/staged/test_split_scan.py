"""A scan that is cut along the axis it runs along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import shardmap as sm
from shardmap.planning.lax.staged import split_scan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

W, X = reals(6, 6) * 0.3, reals(20, 8, 6)


def recurrent(w, x, reverse=False):
    """The last state, a row for each step, and a sum over steps."""

    def step(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state.sum(-1)

    start = jnp.zeros(x.shape[1:])
    state, rows = lax.scan(step, start, jnp.sin(x), reverse=reverse)
    return state, rows * 2, rows.sum(0)


def loss(w, x):
    return sum((part**2).sum() for part in recurrent(w, x))


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", [{0: 5}, {0: (3, 5, 5, 7)}, {0: 3, 1: 2}], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.one_in(2)
def test_it_is_the_same_scan(cut, reverse):
    def fun(w, x):
        return recurrent(w, x, reverse)

    shard_plan = check_cut(fun, W, X, in_slices=(None, cut), tolerance=1e-5)
    pieces = 5 if cut == {0: 5} else len(cut[0]) if 1 not in cut else 3
    assert len(shard_plan.stages) == pieces + 1


def test_each_stage_reads_its_own_steps():
    shard_plan = sm.plan(recurrent, W, X, in_slices=(None, {0: 4}))
    read = [shard.in_slices[1][0] for shard in shard_plan.shards if shard.stage < 4]
    assert read == [slice(0, 5), slice(5, 10), slice(10, 15), slice(15, 20)]


@pytest.mark.few(1)
@pytest.mark.parametrize("inside", [False, True])
def test_gradients(inside):
    gradient = jax.grad(loss, (0, 1))
    cut = (None, {0: 4})
    fun = jax.grad(sm.chunked(loss, cut), (0, 1))
    if inside:
        fun = sm.chunked(gradient, cut)
    assert_same(jax.jit(fun)(W, X), gradient(W, X), 1e-4)


@pytest.mark.deep
def test_steps_without_results_and_results_without_a_state_to_the_end():
    def last(x):
        return lax.scan(lambda state, row: (0.5 * state + row, None), 0.0, x)[0]

    def rows(x):
        return lax.scan(lambda state, row: (state + row, (state, row)), 0.0, x)[1]

    for fun in (last, rows):
        check_cut(fun, reals(12), in_slices=({0: 3},), tolerance=1e-5)
        chunked = sm.chunked(fun, {0: 3}, strict=True)
        assert_same(chunked(reals(12)), fun(reals(12)), 1e-5)
        assert "stays cut at piece of a scan" in str(chunked.explain(reals(12)))


@pytest.mark.deep
def test_several_axes_and_those_that_are_not_cut():
    def fun(x, y):
        def step(state, row):
            a, b, k = row
            return state + a, (state * b).sum() + k

        rows = x, y, jnp.arange(len(x), dtype=jnp.float32)
        return lax.scan(step, jnp.zeros(x.shape[1:]), rows)

    x, y = reals(12, 4), reals(12, 4, seed=1)
    for cut in (({0: 3}, None), ({0: 3}, {0: 3}), (None, {0: 4})):
        check_cut(fun, x, y, in_slices=cut, tolerance=1e-5)


def test_a_scan_after_a_scan():
    def fun(x):
        _, rows = lax.scan(lambda state, row: (state + row, state), x[0], x)
        return lax.scan(lambda state, row: (state * row, state), x[0], jnp.cos(rows))

    shard_plan = check_cut(fun, reals(12, 3), in_slices=({0: 3},), tolerance=1e-4)
    assert shard_plan.num_shards > 6


@examples(6)
@given(st.data())
def test_any_cut(data):
    in_slices = data.draw(cuts((W, X)))
    shard_plan = sm.plan(recurrent, W, X, in_slices=in_slices)
    assert_same(shard_plan.run(W, X), jax.jit(recurrent)(W, X), 1e-4)


def test_long_ones_are_cut_less_often(monkeypatch):
    monkeypatch.setattr(split_scan, "MOST_PIECES", 4)
    shard_plan = check_cut(recurrent, W, X, in_slices=(None, {0: 10}), tolerance=1e-5)
    assert len(shard_plan.stages) == 4 + 1


@pytest.mark.deep
def test_what_the_steps_are_made_of_is_there_for_one_piece_at_a_time():
    def fun(w, x):
        wide = jnp.tanh(x @ w)
        state = jnp.zeros(w.shape[1])
        return lax.scan(lambda s, row: (0.9 * s + row, (s * s).sum()), state, wide)[1]

    w, x = reals(4, 512), reals(512, 4)
    whole = jax.jit(fun).lower(w, x).compile().memory_analysis()
    cut = jax.jit(sm.chunked(fun, (None, {0: 16})))
    found = cut.lower(w, x).compile().memory_analysis()
    assert found.temp_size_in_bytes < whole.temp_size_in_bytes / 8
    np.testing.assert_allclose(cut(w, x), fun(w, x), rtol=1e-4)
    shard_plan = sm.plan(fun, w, x, in_slices=(None, {0: 16}))
    assert "computes the dot_general" not in str(shard_plan.explain())
    assert shard_plan.peak_bytes < wide_bytes(w, x) / 4


def wide_bytes(w, x):
    return 4 * w.shape[1] * x.shape[0]


@pytest.mark.deep
def test_memory_chooses_it():
    def fun(x):
        wide = jnp.sin(jnp.outer(x, jnp.arange(1024.0)))
        state = jnp.zeros(1024)
        return lax.scan(lambda s, row: (jnp.tanh(s + row), s.sum()), state, wide)[1]

    x = reals(1024)
    chunked = sm.chunked(fun, {0: sm.AUTO}, memory="1 MiB")
    assert_same(chunked(x), jax.jit(fun)(x), 1e-4)
    assert "pieces" in str(chunked.explain(x))
