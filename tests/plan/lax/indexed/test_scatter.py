"""Updates along an axis that is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.plan import plan
from tests.plan.checks import check_cut
from tests.plan.plan_programs import X, ints, reals

FAR = np.array([3, -9, 7, 0, 25, -1], np.int32)


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["add", "subtract", "min", "max", "multiply"])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_updates_that_combine_are_cut(name, dtype, mode):
    def fun(x, i, y):
        return getattr(x.at[i], name)(y, mode=mode)

    x, y = (X * 9).astype(dtype), (reals(6, 6, seed=5) * 9).astype(dtype)
    shard_plan = check_cut(
        fun, x, FAR, y, in_slices=({0: 3}, {0: (1, 5)}, {0: 2, 1: 2}), tolerance=1e-4
    )
    assert shard_plan.num_shards == 3 * 3 * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["add", "set", "max"])
def test_updates_of_counted_rows_are_cut_with_them(how):
    labels = ints(8, high=6)

    def fun(x, i, values):
        return getattr(x.at[jnp.arange(8), i], how)(values)

    values = np.arange(8, dtype=np.float32)
    for cuts in (({0: 4}, None, None), ({0: 4, 1: 2}, None, {0: 4})):
        shard_plan = check_cut(fun, X, labels, values, in_slices=cuts)
        assert shard_plan.num_shards == np.prod(list(cuts[0].values()))


def test_each_update_is_taken_once():
    n = 100_000

    def fun(x, places, updates):
        total = jnp.zeros(n).at[places].add(updates)
        return x.T @ total, (x * x).T @ (total * total)

    x, updates = (jax.ShapeDtypeStruct((n, *row), np.float32) for row in ((8,), ()))
    places = jax.ShapeDtypeStruct((n,), np.int32)
    shard_plan = plan(fun, x, places, updates, in_slices=({1: 4}, None, None))
    assert [stage.num_shards for stage in shard_plan.stages] == [1, 4]


@pytest.mark.few(1)
def test_a_literal_marks_one_place():
    def fun(x, i):
        return jnp.where(jnp.zeros(x.shape[0], bool).at[i].set(True), x[:, 0], 0), x

    shard_plan = check_cut(fun, X, np.int32(3), in_slices=({0: 4}, None))
    assert shard_plan.num_shards == 4
