"""What is behind a plan: checked arguments, boxes that are read, compiled functions."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.cutting import cut_function
from tests.plan.run.checks import W, columns

ROWS = ({0: 8}, None)


@pytest.fixture(scope="module")
def cut():
    return cut_function(columns, ((np.zeros((64, 8), np.float32), W), {}), ROWS)


def compiled(fun, args, in_slices):
    """The functions of all shards, and how many stages these are of."""
    cut = cut_function(fun, (args, {}), in_slices)
    found = {
        cut.compiled(stage, stage.recipe(k)[1])
        for stage in cut.stages
        for k in range(stage.num_shards)
    }
    return len(found), len(cut.stages)


def test_steps_of_a_loop_share_their_functions():
    x, w = np.ones((64, 8), np.float32), np.ones(8, np.float32)

    def power(x, v):
        def step(_, v):
            v = x.T @ (x @ v)
            return v / jnp.linalg.norm(v)

        return lax.fori_loop(0, 8, step, v)

    # The first, the last, and those between them.
    assert compiled(power, (x, w), ROWS) == (3, 9)

    def descent(x, w):
        return lax.fori_loop(0, 8, lambda _, w: w - 0.1 * x.T @ (x @ w - 1), w)

    # What the loop carries is kept by the first shard of each stage.
    assert compiled(descent, (x, w), ROWS) == (7, 9)
    twice = compiled(lambda x, w: descent(x, descent(x, w)), (x, w), ROWS)
    assert twice == (7, 17)


def test_pieces_that_are_neighbours_share_the_function_of_others():
    x = np.ones((60, 8), np.float32)
    # Of a piece with itself, and with another one.
    assert compiled(lambda x: x @ x.T, (x,), {0: 10}) == (2, 1)
    # Of 16 or 15 rows: each with itself, and four pairs.
    assert compiled(lambda x: x @ x.T, (x[:, :1],), {0: (20, 20, 10, 10)}) == (6, 1)
