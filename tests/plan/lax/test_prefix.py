"""Running reductions along the axis that is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from shardmap.planning.lax.batched import KINDS
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, cuts
from tests.plan.plan_programs import X, ints
from tests.strategies import examples

ODD = np.where(X > 1, np.nan, np.where(X < -1.5, -np.inf, X))


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.hypothesis
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", [primitive.name for primitive in KINDS])
@pytest.mark.parametrize("x", [ODD, ints(8, 6)], ids=["floats", "ints"])
def test_any_cut_of_a_running_reduction(name, reverse, x):
    if name == "cumlogsumexp" and x.dtype == np.int32:
        x = X.astype(np.complex64)

    def fun(x):
        return getattr(lax, name)(jnp.negative(x), axis=0, reverse=reverse) * 2

    want = jax.jit(fun)(x)

    @examples(1)
    @given(cuts((x,)))
    def check(in_slices):
        shard_plan = plan(fun, x, in_slices=in_slices)
        assert_same(shard_plan.run(x), want, 1e-4)
        assert shard_plan.num_shards > 1

    check()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_small_floats_are_rounded_once(dtype):
    x = (np.abs(np.concatenate([X, X + 1, X * 3])) + 1).astype(dtype)
    want = np.cumsum(x.astype(np.float64), 0)
    shard_plan = plan(lambda x: jnp.cumsum(x, 0), x, in_slices={0: 7})
    got = shard_plan.run(x)
    assert got.dtype == dtype
    assert shard_plan.num_shards > 7
    # Half of the last digit, that of float32 besides.
    digit = float(jnp.finfo(dtype).eps)
    assert (np.abs(got.astype(np.float64) / want - 1) <= digit / 2 * 1.01).all()
    whole = np.asarray(jax.jit(lambda x: jnp.cumsum(x, 0))(x)).astype(np.float64)
    worst = np.abs(whole - want).max()
    assert np.abs(got.astype(np.float64) - want).max() <= worst


def test_its_three_stages():
    shard_plan = plan(lambda x: jnp.cumsum(x, 0), X, in_slices=({0: (3, 5)},))
    assert [stage.num_shards for stage in shard_plan.stages] == [2, 1, 2]
    rows = [shard.in_slices[0][0] for shard in shard_plan.stage_shards(2)]
    assert rows == [slice(0, 3), slice(3, 8)]
    assert shard_plan.out_slices == {0: [(0, 3), (3, 8)]}


def test_its_gradient():
    def fun(x):
        return jax.grad(lambda x: (jnp.cumsum(x, 0) ** 2).sum())(x)

    shard_plan = plan(fun, X, in_slices=({0: 4},))
    assert_same(shard_plan.run(X), jax.jit(fun)(X), 1e-4)
    assert shard_plan.num_shards > 8


def test_one_function_called_with_different_cuts():
    @jax.jit
    def running(x):
        return jnp.cumsum(x, 0)

    def fun(x, y):
        return running(x), running(y)

    shard_plan = plan(fun, X, X, in_slices=({0: (3, 5)}, {0: (6, 2)}))
    assert_same(shard_plan.run(X, X), jax.jit(fun)(X, X), 1e-4)
    # Each call has its own cuts: two pieces of each argument.
    assert [stage.num_shards for stage in shard_plan.stages] == [4, 1, 4]


@pytest.mark.deep
def test_one_in_a_call_that_jax_writes_anew():
    # Where true elements stand: in newer JAX a primitive, written in terms of others.
    def fun(x):
        return jnp.nonzero(x[:, 0] > 0, size=6, fill_value=-1)

    shard_plan = plan(fun, X, in_slices=({0: (3, 4, 1)},))
    assert_same(shard_plan.run(X), jax.jit(fun)(X))
    assert "stops at" not in str(shard_plan)
    assert [stage.num_shards for stage in shard_plan.stages][-2:] == [3, 1]


def test_whole_without_partial_results():
    shard_plan = plan(lambda x: jnp.cumsum(x, 0), X, in_slices=({0: 4},), partial=False)
    assert shard_plan.num_shards == 1
    assert "each element depends on all before it" in str(shard_plan.explain())
