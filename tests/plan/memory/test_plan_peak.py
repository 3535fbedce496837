"""The memory of one shard: what it reads, computes, gives back and what is kept."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.cutting import cut_function
from shardmap.plan.memory.plan_peak import (
    kept_bytes,
    plan_peak,
    scratch_bytes,
    shard_peak,
    temporaries,
)
from tests.plan.plan_programs import reals

X = reals(640, 512)
ROW = 512 * 4


def standard(x):
    y = x - x.mean(0, keepdims=True)
    return jnp.sort(jnp.sort(y, 1), 0)


def test_a_shard_holds_what_it_reads_computes_and_gives_back():
    made = cut_function(lambda x: x * 2, (X,), ({0: (600, 40)},))
    [stage] = made.stages
    assert shard_peak(made, stage).bytes == 2 * 600 * ROW
    assert temporaries(made, stage) == 0
    assert plan_peak(made).bytes == 2 * 600 * ROW


def test_parts_of_sums_are_counted_as_they_are_put_together():
    made = cut_function(lambda x: x.sum(0), (X,), ({0: 4},))
    [stage] = made.stages
    assert stage.num_shards == 4
    # A row for the sum, and one for each level of the tree that puts it together.
    assert kept_bytes(made, 0) % ROW == 0
    deeper = cut_function(lambda x: x.sum(0), (X,), ({0: 640},))
    assert kept_bytes(deeper, 0) > kept_bytes(made, 0)
    assert plan_peak(made).bytes == shard_peak(made, stage).bytes + kept_bytes(made, 0)


@pytest.mark.parametrize("scratch", [None, "folder"])
def test_what_later_stages_need_is_held_or_lies_in_scratch(scratch):
    made = cut_function(standard, (X,), ({0: 4},), scratch=scratch)
    places = range(len(made.stages))
    in_scratch = [scratch_bytes(made, place) for place in places]
    held = [kept_bytes(made, place) for place in places]
    if scratch is None:
        assert in_scratch == [0] * len(places)
        assert max(held) >= X.nbytes
    else:
        assert max(in_scratch) == X.nbytes
        assert max(held) < X.nbytes
    assert plan_peak(made).bytes >= max(held)


def test_small_values_stay_in_memory():
    small = np.ones((64, 64), np.float32)
    made = cut_function(standard, (small,), ({0: 4},), scratch="folder")
    assert [scratch_bytes(made, k) for k in range(len(made.stages))] == [0] * len(
        made.stages
    )
