"""Positions of a loop's shards: computed from the counter, or looked up."""

import time

import jax
import jax.numpy as jnp
import numpy as np

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


def test_a_loop_over_very_many_pieces_is_prepared_quickly():
    count = 300_000  # Comparing positions shard by shard took three seconds.
    x = jax.ShapeDtypeStruct((count, 2), np.float32)
    run = jax.jit(sm.chunked(lambda x: jnp.sin(x).sum(), {0: count}))
    start = time.process_time()
    run.lower(x)
    assert time.process_time() - start < 1.2
