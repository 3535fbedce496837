"""The cases that this plan's ancestor had, with its numbers, and its holes."""

import jax.numpy as jnp
import numpy as np

from shardmap.planning.in_slices import EACH
from shardmap.planning.plan import plan
from tests.plan.checks import check, iota, slices
from tests.plan.plan_programs import X, Y


def test_dot_in_rows_and_columns():
    shard_plan = check(
        jnp.dot,
        iota(3, 2),
        iota(2, 3),
        in_slices=({0: EACH}, {1: EACH}),
        shards=9,
        want=[[3, 4, 5], [9, 14, 19], [15, 24, 33]],
    )
    assert [s.out_slices for s in shard_plan.shards] == [
        slices((i, i + 1), (j, j + 1)) for i in range(3) for j in range(3)
    ]


def vectors(*values):
    return [np.array(value, np.float32) for value in values]


def test_a_dot_and_what_follows():
    a, b = vectors([1, 2], [3, 4])

    def fun(a, b):
        return jnp.dot(a + b, a - b) * 2 / 4

    # Linear in the partial result: one stage is enough where two were needed.
    shard_plan = check(fun, a, b, in_slices=EACH, shards=2, want=-10)
    assert shard_plan.shards[0].combiner == "add"
    check(lambda a, b: jnp.tanh(fun(a, b)), a, b, in_slices=EACH, stages=2)


def test_a_value_and_its_transpose():
    shard_plan = check(
        lambda x: x + x.T, iota(4, 4), in_slices=({0: 2, 1: 2},), shards=4
    )
    apart = shard_plan.shards[1].in_slices[0]
    assert apart == [slices((0, 2), (2, 4)), slices((2, 4), (0, 2))]


def test_an_unused_argument_is_not_read():
    class Unreadable:
        shape, dtype = (4,), np.dtype(np.float32)

        def __getitem__(self, index):
            raise AssertionError("this was read")

    x = iota(4, dtype=np.float32)
    shard_plan = plan(lambda a, b, c: a * 2 + c, x, Unreadable(), x, in_slices=EACH)
    np.testing.assert_array_equal(shard_plan.run(x, Unreadable(), x), x * 3)
    assert shard_plan.shards[0].in_slices[1] is None


def test_different_cuts_are_refined():
    shard_plan = check(jnp.add, X, Y, in_slices=({0: 2}, {0: (3, 5)}), shards=3)
    assert shard_plan.out_slices == {0: [(0, 3), (3, 4), (4, 8)]}
