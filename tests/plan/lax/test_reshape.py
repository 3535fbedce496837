"""Axes merged and split: which boxes of the operand hold a box of the result."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import reals


@pytest.mark.parametrize(
    ("shape", "new", "cut", "shards"),
    [
        ((8, 6), (48,), {0: 4}, 4),
        ((48,), (8, 6), {0: 4}, 4),
        ((48,), (8, 6), {0: (5, 20, 23)}, 2),
        ((4, 6, 5), (24, 5), {0: 2, 2: 5}, 10),
        ((8, 6), (4, 2, 6), {0: 8}, 8),
        ((2, 3, 4), (6, 1, 4), {2: 2}, 2),
    ],
)
def test_the_first_of_merged_and_split_axes_stays_cut(shape, new, cut, shards):
    shard_plan = check_cut(
        lambda x: x.reshape(new) * 2, reals(*shape), in_slices=(cut,)
    )
    assert shard_plan.num_shards == shards


@settings(max_examples=8)
@given(st.sampled_from([(6, 8), (2, 24), (3, 4, 4), (48,), (12, 4)]), st.data())
def test_any_box_of_any_shape(new, data):
    """A slice of the reshaped array asks for boxes that do not end with a row."""
    start = data.draw(st.integers(0, new[-1] - 1))

    def fun(x):
        return x.reshape(new)[..., start:] * 1

    x = reals(8, 6)
    shard_plan = plan(fun, x, in_slices=({0: data.draw(st.integers(2, 8))},))
    assert_same(shard_plan.run(x), jax.jit(fun)(x))


def test_a_slice_of_split_axes_under_x64():
    x = np.arange(96, dtype=np.float32).reshape(24, 4)
    with jax.enable_x64(True):
        shard_plan = plan(lambda x: x.reshape(6, 4, 4)[:, 0], x, in_slices={0: 2})
        np.testing.assert_array_equal(shard_plan.run(x), x.reshape(6, 4, 4)[:, 0])
