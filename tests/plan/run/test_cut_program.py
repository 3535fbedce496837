"""What is behind a plan: checked arguments, boxes that are read, compiled functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.cutting import cut_function
from tests.plan.run.checks import W, columns

ROWS = ({0: 8}, None)


@pytest.fixture(scope="module")
def cut():
    return cut_function(columns, (np.zeros((64, 8), np.float32), W), ROWS)


def test_arguments_are_checked_against_the_plan(cut):
    x = np.ones((64, 8), np.float32)
    first, second = cut.leaves((x, W))
    assert first is x
    assert second is W
    with pytest.raises(ValueError, match="arguments of the structure"):
        cut.leaves((x,))
    with pytest.raises(ValueError, match=r"shape of \(64, 8\) in args\[0\], got"):
        cut.leaves((x[1:], W))
    with pytest.raises(ValueError, match=r"float32 in args\[1\], got int32"):
        cut.leaves((x, W.astype(np.int32)))


def test_a_shard_reads_its_boxes_and_gets_its_places(cut):
    x = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    _, recipe = cut.stages[0].recipe(3)
    *reads, starts = cut.read(recipe, [x, W], {})
    assert any(np.array_equal(part, x[24:32]) for part in reads)
    assert starts.tolist() == list(recipe.starts)


def test_what_an_earlier_stage_makes_must_be_there(cut):
    _, recipe = cut.stages[1].recipe(0)
    needed = [v for v, _ in recipe.reads if v.producer is not None]
    assert needed
    x = np.zeros((64, 8), np.float32)
    with pytest.raises(ValueError, match=r"give args\(..., values=acc\)"):
        cut.read(recipe, [x, W], {})
    kept = {v: np.full(v.shape, 7, v.aval.dtype) for v in needed}
    *reads, _ = cut.read(recipe, [x, W], kept)
    assert sum(bool((part == 7).all()) for part in reads) == len(needed)


def test_one_function_for_shards_that_differ_in_place(cut):
    stage = cut.stages[0]
    recipes = [stage.recipe(k)[1] for k in range(stage.num_shards)]
    assert len({recipe.static for recipe in recipes}) == 1
    assert cut.compiled(stage, recipes[0]) is cut.compiled(stage, recipes[-1])


def compiled(fun, args, in_slices):
    """The functions of all shards, and how many stages these are of."""
    cut = cut_function(fun, args, in_slices)
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
    assert compiled(descent, (x, w), ROWS) == (5, 9)
    twice = compiled(lambda x, w: descent(x, descent(x, w)), (x, w), ROWS)
    assert twice == (5, 17)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_digits_of_a_median_are_counted_by_one_function(dtype):
    x = np.arange(64 * 8).reshape(64, 8).astype(dtype)
    functions, stages = compiled(lambda x: jnp.median(x, 0), (x,), {0: 4})
    assert stages > 2 * x.dtype.itemsize
    assert functions <= 6


def test_pieces_that_are_neighbours_share_the_function_of_others():
    x = np.ones((60, 8), np.float32)
    # Of a piece with itself, and with another one.
    assert compiled(lambda x: x @ x.T, (x,), {0: 10}) == (2, 1)
    # Of 16 or 15 rows: each with itself, and four pairs.
    assert compiled(lambda x: x @ x.T, (x[:, :1],), {0: (20, 20, 10, 10)}) == (6, 1)


def test_the_shards_of_all_stages(cut):
    assert [stage.num_shards for stage in cut.stages] == [8, 8]
    assert cut.num_shards == 16


def test_keys_go_in_and_out_as_bits():
    keys = jax.random.split(jax.random.key(0), 6)
    cut = cut_function(lambda k: k[::-1], (keys,), ({0: 2},))
    _, recipe = cut.stages[0].recipe(0)
    [part, starts] = cut.read(recipe, [keys], {})
    [result] = cut.function(cut.stages[0], recipe.static)(part, starts)
    want = jax.random.key_data(keys[::-1])[:3]
    np.testing.assert_array_equal(result, want)
