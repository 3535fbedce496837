"""Loops and branches that sum over a cut: each shard carries a part of the sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.api.spmap import spmap
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import X, reals
from tests.strategies import examples

RAGGED = {1: (2, 4, 1)}
WEIGHTS = {"w": reals(5, 5) * 0.3, "b": reals(5, seed=2) * 0.3}
INPUTS = reals(4, 7, 5)


def recurrent(weights, inputs):
    def step(carry, x):
        carry = jnp.tanh(carry @ weights["w"] + x + weights["b"][None])
        return carry, carry

    return lax.scan(step, jnp.zeros(inputs.shape[1:]), inputs)[1]


def rematerialised(weights, inputs):
    @jax.checkpoint
    def step(carry, x):
        return jnp.tanh(carry @ weights["w"] + x) + weights["b"][None], None

    return lax.scan(step, jnp.zeros(inputs.shape[1:]), inputs)[0]


def layers(weights, inputs):
    stacked = jnp.stack([weights["w"], weights["w"].T])

    def layer(h, w):
        return jnp.tanh(h @ w) + h, None

    return lax.scan(layer, inputs, stacked)[0]


def differential(weights, inputs):
    def slope(y):
        return jnp.tanh(y @ weights["w"])

    def step(y, _):
        half = y + 0.05 * slope(y)
        return y + 0.1 * slope(half), None

    return lax.scan(step, inputs, None, length=3)[0]


def nested(weights, inputs):
    def outer(carry, x):
        def inner(h, _):
            return jnp.tanh(h @ weights["w"] + x), None

        return lax.scan(inner, carry, None, length=2)[0], None

    return lax.scan(outer, inputs[0], inputs)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "net", [recurrent, rematerialised, layers, differential, nested]
)
def test_the_gradient_of_a_loop(net):
    def loss(weights, inputs):
        return (net(weights, inputs) ** 2).mean()

    fun = jax.value_and_grad(loss, (0, 1))
    shard_plan = check_cut(
        fun, WEIGHTS, INPUTS, in_slices=(None, RAGGED), tolerance=2e-4
    )
    assert shard_plan.num_shards == 3
    assert len(shard_plan.stages) == 1


def carried(x):
    def step(carry, row):
        most, total, other = carry
        return (jnp.maximum(most, row.max(0)), total + row.sum(0), other * 0.5), (
            row.min(0),
            row.sum(1),
        )

    start = (jnp.full(x.shape[2:], 0.2), jnp.ones(x.shape[2:]), jnp.float32(3))
    return lax.scan(step, start, x)


def test_what_is_carried_first_counts_once():
    shard_plan = check_cut(carried, INPUTS, in_slices=(RAGGED,))
    assert shard_plan.num_shards == 3
    combiners = [*shard_plan.shards[0].combiner[0], *shard_plan.shards[0].combiner[1]]
    assert combiners == ["max", "add", "insert", "min", "insert"]


@examples(3)
@given(st.data())
def test_parts_of_any_cut(data):
    in_slices = data.draw(cuts((INPUTS,)))
    for fun in (carried, jax.grad(lambda x: (recurrent(WEIGHTS, x) ** 2).sum())):
        shard_plan = plan(fun, INPUTS, in_slices=in_slices)
        assert_same(shard_plan.run(INPUTS), jax.jit(fun)(INPUTS), 2e-4)


def test_a_sum_that_is_not_linear_is_whole():
    def fun(x):
        return lax.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, jnp.sin(c[1] + x.sum(0))),
            (0, x[0]),
        )

    shard_plan = plan(fun, X, in_slices=({0: 2, 1: 3},))
    assert shard_plan.num_shards == 3
    assert_same(shard_plan.run(X), jax.jit(fun)(X))


def test_pieces_of_two_loops_that_are_one_do_not_meet_alone():
    """The sum over all pairs of rows is not that over the pairs in each piece."""

    def fun(x, times):
        def step(_, total):
            return total + (x.sum(0)[None] * x).sum()

        return lax.fori_loop(0, times, step, 0.0), x * 2

    args = X, np.int32(2)
    shard_plan = plan(fun, *args, in_slices=({0: 2}, None))
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args), 1e-4)


def test_a_condition_sees_what_is_complete():
    def fun(x):
        return lax.while_loop(
            lambda c: c[0] < 20,
            lambda c: (c[0] + jnp.abs(c[1]).sum() + 1, c[1]),
            (0.0, x),
        )[0]

    shard_plan = plan(fun, X, in_slices=({0: 2},))
    assert shard_plan.num_shards == 1
    assert_same(shard_plan.run(X), jax.jit(fun)(X))


def test_a_loop_of_unknown_length_that_adds_is_whole():
    def fun(times, x):
        def step(k, carry):
            return carry[0] * 0.5, carry[1] + (carry[0] * k).sum(0)

        return lax.fori_loop(0, times, step, (x, jnp.ones(x.shape[1])))

    shard_plan = check_cut(fun, np.int32(3), X, in_slices=(None, {0: (3, 5), 1: 2}))
    assert shard_plan.num_shards == 2
    assert "becomes stages if its number of steps" in str(shard_plan.explain())


@pytest.mark.few(1)
@pytest.mark.parametrize("which", [True, False])
@pytest.mark.parametrize("how", ["call", "gradient"])
def test_a_branch_that_sums(which, how):
    def fun(p, w, x):
        return lax.cond(p, lambda x: (x @ w).sum(0), lambda x: w.sum(0) + 1, x)

    if how == "gradient":
        inner = fun
        fun = jax.grad(lambda p, w, x: (inner(p, w, x)).sum(), 1)
    args = which, reals(6, 3), X
    shard_plan = check_cut(fun, *args, in_slices=(None, None, {0: (1, 5, 2)}))
    assert shard_plan.num_shards == 3


def test_a_map_of_elements_that_sum():
    def fun(w, x):
        return spmap(lambda row: jnp.tanh(row @ w).sum(0))(x)

    w = reals(5, 3)
    check_cut(fun, w, INPUTS, in_slices=(None, {0: 2, 1: 3}))
    gradient = jax.grad(lambda w, x: fun(w, x).sum())
    shard_plan = check_cut(gradient, w, INPUTS, in_slices=(None, RAGGED))
    assert shard_plan.num_shards == 3
