"""Branches in a plan: what all of them treat index by index is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import X, Y, reals


@pytest.mark.few(2)
@pytest.mark.parametrize("which", [-3, 0, 1, 2, 9])
def test_every_branch_gives_what_it_gives_uncut(which):
    def fun(k, x, y):
        branches = [jnp.sin, lambda x: x * 2, lambda x: x[::-1][::-1] + y]
        return lax.switch(k, branches, x)

    in_slices = (None, {1: (2, 4)}, None)
    shard_plan = check_cut(fun, np.int32(which), X, Y, in_slices=in_slices)
    assert shard_plan.num_shards == 2


def test_what_one_branch_mixes_is_whole():
    def fun(k, x):
        return lax.cond(k > 0, jnp.sin, lambda x: jnp.fft.fft(x, axis=0).real, x)

    shard_plan = plan(fun, np.int32(0), X, in_slices=(None, {0: 2, 1: 3}))
    assert shard_plan.num_shards == 3
    assert "mixes this axis" in str(shard_plan.explain())
    for k in (0, 1):
        assert_same(shard_plan.run(np.int32(k), X), jax.jit(fun)(np.int32(k), X))


def test_branches_that_combine_in_different_ways():
    """A result is a sum over one argument, or a maximum over the other."""

    def fun(k, x, y):
        return lax.cond(k > 0, lambda x, y: x.sum(), lambda x, y: y.max(), x, y)

    for k in (0, 1):
        args = np.int32(k), X, Y
        for of_x, of_y in [(2, 1), (1, 3), (2, 3)]:
            shard_plan = plan(fun, *args, in_slices=(None, {0: of_x}, {0: of_y}))
            assert shard_plan.num_shards == (of_x if of_x > 1 else of_y)
            assert_same(shard_plan.run(*args), jax.jit(fun)(*args), 1e-4)
    assert "combines in another way" in str(shard_plan.explain())


def test_branches_that_combine_one_axis_in_different_ways():
    def fun(k, x):
        return lax.cond(k > 0, lambda x: x.sum(0), lambda x: x.max(0), x)

    shard_plan = check_cut(fun, np.int32(1), X, in_slices=(None, {0: 2, 1: 3}))
    assert shard_plan.num_shards == 3


def test_branches_that_read_different_boxes():
    """Each gets the hull of them, and takes its own part."""

    def fun(k, x, y):
        ahead, behind = lambda x: x[2:] * 2, lambda x: x[:-2] + y[1:-1]
        return lax.cond(k > 0, ahead, behind, x)

    for k in (0, 1):
        args = np.int32(k), X, Y
        shard_plan = plan(fun, *args, in_slices=(None, {0: 2, 1: 2}, None))
        assert_same(shard_plan.run(*args), jax.jit(fun)(*args))
        assert shard_plan.num_shards > 1


def test_a_result_of_a_literal():
    def fun(k, x):
        return lax.cond(k > 0, lambda x: (x, 1.0), lambda x: (x * 2, 0.0), x)

    check_cut(fun, np.int32(1), X, in_slices=(None, {0: 4}))


def test_a_branch_that_takes_a_mean_is_whole():
    def fun(x):
        return lax.cond(x[0, 0] > 0, lambda x: x - x.mean(), lambda x: x * 2, x)

    with pytest.warns(UserWarning, match="runs as a whole"):
        shard_plan = plan(fun, X, in_slices={0: 4})
    assert "compute all branches, and choose with jnp.where" in str(shard_plan)
    assert_same(shard_plan.run(X), jax.jit(fun)(X))
    check_cut(
        lambda x: jnp.where(x[0, 0] > 0, x - x.mean(), x * 2), X, in_slices={0: 4}
    )


def test_the_gradient_of_a_diagonal_has_no_branches():
    """`jnp.diag` is one function on some platforms, another on others."""

    def loss(a, b):
        return -jnp.diag(jax.nn.log_softmax(a @ b.T, 1)).mean()

    a, b = reals(28, 7), reals(28, 7, seed=1)
    for in_slices in (None, {0: 4}), ({0: 4}, None):
        shard_plan = check_cut(jax.grad(loss), a, b, in_slices=in_slices)
        assert all(stage.num_shards <= 4 for stage in shard_plan.stages)
        assert "cond" not in str(shard_plan)
