"""Loops in a plan: what the body treats index by index is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import X, Y, reals


@pytest.mark.few(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_cut_across_its_carry(reverse):
    def fun(x):
        def step(carry, row):
            carry = carry * 0.5 + jnp.sin(row)
            return carry, carry * row

        return lax.scan(step, jnp.zeros(6), x, reverse=reverse)

    shard_plan = check_cut(fun, X, in_slices=({1: (1, 3, 2)},))
    assert shard_plan.num_shards == 3


def test_a_scan_without_a_carry_is_cut_along_its_axis():
    def fun(x, w):
        return lax.map(lambda row: jnp.cumsum(row) @ w, x)

    shard_plan = check_cut(fun, X, reals(6, 4), in_slices=({0: (3, 5)}, None))
    assert [s.in_slices[0][0] for s in shard_plan.shards] == [slice(0, 3), slice(3, 8)]


def test_a_carry_that_mixes_an_axis_is_whole():
    def fun(x):
        return lax.scan(lambda c, r: (jnp.fft.fft(c).real + r, c), x[0], x)

    shard_plan = plan(fun, X, in_slices=({1: 2},))
    assert shard_plan.num_shards == 1
    assert "mixes this axis" in str(shard_plan.explain())
    assert_same(shard_plan.run(X), jax.jit(fun)(X))


def test_a_carried_box_grows_to_what_the_body_reads():
    """Only the last carry is asked for; it takes the others, one step later each."""

    def fun(x):
        def step(carry, row):
            a, b, c = carry
            return (a + row, b + jnp.sin(a), c * b), None

        return lax.scan(step, (x[0], x[1], x[2]), x)[0][2]

    check_cut(fun, X, in_slices=({1: 3},))


@pytest.mark.parametrize("unroll", [1, 3])
def test_constants_of_the_body_are_cut_too(unroll):
    weights = jnp.asarray(Y)

    def fun(x):
        def step(carry, row):
            return carry + row * weights[0] + weights.sum(0), None

        return lax.scan(step, jnp.zeros(6), x, unroll=unroll)[0]

    check_cut(fun, X, in_slices=({1: 2},))


def test_a_while_loop_is_cut_where_its_condition_does_not_look():
    def fun(x):
        def body(state):
            k, y = state
            return k + 1, y * 0.5 + 1

        return lax.while_loop(lambda s: s[0] < 5, body, (0, x))

    shard_plan = check_cut(lambda x: fun(x)[1], X, in_slices=({0: 2, 1: 3},))
    assert shard_plan.num_shards == 6


def test_elements_of_a_mapped_loop_stop_on_their_own():
    def one(row):
        return lax.while_loop(lambda r: r.sum() < 9, lambda r: r + jnp.abs(r) + 1, row)

    shard_plan = check_cut(jax.vmap(one), X, in_slices=({0: (1, 4, 3)},))
    assert shard_plan.num_shards == 3
    counts = jax.vmap(lambda r: one(r).max() / (1 + jnp.abs(r).max()))(X)
    assert len(np.unique(np.asarray(counts))) > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("of", [({0: 4}, None), (None, {0: 4}), ({0: 4}, {0: (5, 3)})])
def test_what_only_the_condition_takes_is_cut_with_it(of):
    def one(row, bound):
        return lax.while_loop(lambda r: r.sum() < bound, lambda r: r + 1 + r * r, row)

    bounds = np.arange(8, dtype=np.float32) * 3
    shard_plan = check_cut(jax.vmap(one), X, bounds, in_slices=of)
    assert shard_plan.num_shards >= 4
    assert "stops at" not in str(shard_plan)


def test_what_a_condition_sums_over_is_not_its_loop():
    def one(row, bounds):
        return lax.while_loop(
            lambda r: r.sum() < (bounds + r[0]).max(), lambda r: r + 1, row
        )

    bounds = np.arange(8, dtype=np.float32) * 3
    each = jax.vmap(one, (0, None))
    for cuts in ((None, {0: 4}), ({0: 4}, {0: 4})):
        shard_plan = plan(each, X, bounds, in_slices=cuts)
        assert_same(shard_plan.run(X, bounds), jax.jit(each)(X, bounds))
