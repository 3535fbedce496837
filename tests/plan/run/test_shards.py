"""Shards run by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.in_slices import EACH
from shardmap.planning.plan import plan
from tests.plan.checks import check, iota, slices
from tests.plan.plan_programs import X
from tests.plan.run import checks


def test_neighbours_are_read_once():
    shard_plan = check(lambda x: x[1:] - x[:-1], iota(9), in_slices=({0: 3},), shards=3)
    assert [s.in_slices[0] for s in shard_plan.shards] == [
        slices((0, 3)),
        slices((2, 6)),
        slices((5, 9)),
    ]


def test_positions_are_arguments_so_that_shards_share_a_function():
    x = iota(12).astype(np.float32)
    shard_plan = check(lambda x: x + jnp.arange(12.0), x, in_slices=({0: EACH},))
    assert len({shard.function for shard in shard_plan.shards}) == 1
    edges = check(lambda x: jnp.convolve(x, jnp.ones(3)), x, in_slices=EACH)
    assert len({shard.function for shard in edges.shards}) < 7


def test_shards_of_several_stages_in_a_loop():
    shard_plan = plan(jax.nn.softmax, X, in_slices=({1: 2},))
    acc = None
    for shard in shard_plan.shards:
        acc = shard.reduce(shard.function(*shard.args(X, values=acc)), acc)
    np.testing.assert_allclose(acc.result(), jax.nn.softmax(X), rtol=1e-5)
    with pytest.raises(ValueError, match=r"give args.*values=acc"):
        shard_plan.shards[-1].args(X)


def test_results_of_another_plan_are_refused():
    def fun(x):
        return x - x.sum(0, keepdims=True)

    shard_plan, other = (plan(fun, X, in_slices=({0: 2},)) for _ in range(2))
    shard = shard_plan.shards[0]
    part = shard.function(*shard.args(X))
    acc = shard.reduce(part)
    with pytest.raises(ValueError, match="acc is of another plan: give what reduce"):
        other.shards[0].reduce(part, acc)
    with pytest.raises(ValueError, match="values is of another plan"):
        other.shards[-1].args(X, values=acc)
    with pytest.raises(
        TypeError, match=r"what reduce returned, .* got ndarray: plan\.run\(out=\) wri"
    ):
        shard.reduce(part, np.zeros(X.shape, np.float32))


def test_what_no_later_stage_needs_is_let_go():
    def fun(x):
        y = x - x.mean(0, keepdims=True)
        z = y / jnp.abs(y).mean(0, keepdims=True)
        return jnp.tanh(z.sum(0))

    shard_plan = plan(fun, X, in_slices=({0: 2},))
    acc = None
    held = []
    for place in range(len(shard_plan.stages)):
        for shard in shard_plan.stage_shards(place):
            acc = shard.reduce(shard.function(*shard.args(X, values=acc)), acc)
            acc.free(place)
        held.append(len(acc.kept))
    assert held[0] == 1
    assert max(held) < len(shard_plan.stages) + 1
    np.testing.assert_allclose(acc.result(), fun(X), rtol=1e-5, atol=1e-6)


def test_a_later_stage_refuses_values_that_are_not_finished(shard_plan):
    first, last = shard_plan.stage_shards(0), shard_plan.stage_shards(1)
    acc = None
    for shard in first[:3]:
        acc = shard.reduce(shard.function(*shard.args(checks.X, checks.W)), acc)
    with pytest.raises(
        ValueError, match=r"shard 2 of stage 1 .* only 3 of its 8 shards have"
    ):
        last[2].args(checks.X, checks.W, values=acc)
    for shard in first[3:]:
        acc = shard.reduce(shard.function(*shard.args(checks.X, checks.W)), acc)
    result = last[2].function(*last[2].args(checks.X, checks.W, values=acc))
    acc = last[2].reduce(result, acc)
    with pytest.raises(ValueError, match=r"shard 2 of stage 1 has been reduced into"):
        last[2].reduce(result, acc)


def test_a_function_as_bytes(shard_plan):
    pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
    for shard in (shard_plan.stage_shards(0)[3], shard_plan.stage_shards(1)[0]):
        exported = shard.export()
        acc = None
        for each in shard_plan.stage_shards(0):
            each_args = each.args(checks.X, checks.W)
            acc = each.reduce(each.function(*each_args), acc)
        args = shard.args(checks.X, checks.W, values=acc)
        call = jax.export.deserialize(exported.serialize()).call
        for a, b in zip(call(*args), shard.function(*args), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_shard_that_is_not_there_is_named():
    shard_plan = plan(jnp.sin, X, in_slices={0: 4})
    assert shard_plan.shards[-1].number == shard_plan.shards[np.int64(3)].number == 3
    with pytest.raises(IndexError, match="99 is out of range of shards: there are 4"):
        shard_plan.shards[99]
    with pytest.raises(IndexError, match="the index 1 is out of range of stages"):
        shard_plan.stage_shards(1)
    with pytest.raises(
        TypeError, match="the index of shards must be an integer, got 'a"
    ):
        shard_plan.shards["a"]
