"""What is behind a plan: checked arguments, boxes that are read, compiled functions."""

import jax
import numpy as np
import pytest

from shardmap.plan.cutting import cut_program
from tests.plan.run.checks import W, columns

ROWS = ({0: 8}, None)


@pytest.fixture(scope="module")
def cut():
    return cut_program(columns, (np.zeros((64, 8), np.float32), W), ROWS)


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
    statics = [stage.recipe(k)[1].static for k in range(stage.num_shards)]
    assert len(set(statics)) == 1
    assert cut.compiled(stage, statics[0]) is cut.compiled(stage, statics[-1])


def test_the_shards_of_all_stages(cut):
    assert [stage.num_shards for stage in cut.stages] == [8, 8]
    assert cut.num_shards == 16


def test_keys_go_in_and_out_as_bits():
    keys = jax.random.split(jax.random.key(0), 6)
    cut = cut_program(lambda k: k[::-1], (keys,), ({0: 2},))
    _, recipe = cut.stages[0].recipe(0)
    [part, starts] = cut.read(recipe, [keys], {})
    [result] = cut.function(cut.stages[0], recipe.static)(part, starts)
    want = jax.random.key_data(keys[::-1])[:3]
    np.testing.assert_array_equal(result, want)
