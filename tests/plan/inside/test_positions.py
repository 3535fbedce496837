"""Positions of a loop's shards: computed from the counter, or looked up."""

import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm


def test_a_loop_over_pieces_of_any_length_is_right():
    x = jnp.arange(60.0).reshape(30, 2)
    lengths = (2, 1, 2, 3, 1, 1, 2, 5, 5, 5, 3)
    run = sm.chunked(lambda x: (jnp.roll(x, 1, 0) * x).sum(1), {0: lengths})
    np.testing.assert_array_equal(run(x), (jnp.roll(x, 1, 0) * x).sum(1))


def test_a_shard_with_steps_of_its_own_reshapes_a_part_of_what_it_reads():
    x = jnp.arange(24.0).reshape(4, 6)

    def fun(x):
        return jnp.concatenate([x, x * 2]).reshape(-1)

    np.testing.assert_array_equal(sm.chunked(fun, {0: (1, 3), 1: (2, 4)})(x), fun(x))


@pytest.mark.deep
def test_a_loop_over_very_many_pieces_calls_little_for_each():
    count, calls = 100_000, collections.Counter()
    x = jax.ShapeDtypeStruct((count, 2), np.float32)
    run = jax.jit(sm.chunked(lambda x: jnp.sin(x).sum(), {0: count}))
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        run.lower(x)
    finally:
        sys.setprofile(None)
    assert 0 < calls["call"] < 3 * count
