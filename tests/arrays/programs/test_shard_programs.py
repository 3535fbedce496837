"""What is planned for an element of each leaf: programs, and which shards they read."""

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.arrays.programs.on_device import program
from shardmap.arrays.programs.shard_programs import RefusedError, cuts_for, placed


def rows(shape, first=0):
    devices = jax.devices()[first:]
    spec = sm.ShardingSpec(
        (sm.Chunked(len(devices)), *[None] * (len(shape) - 1)), [sm.ShardedAxis(0)]
    )
    return jax.device_put(np.zeros(shape), spec.named_sharding(devices))


def cuts(*leaves, axis=0, index=None):
    return cuts_for(tuple(map(placed, leaves)), axis, index)


def test_one_program_for_all_leaves_on_a_device():
    made = cuts(*[rows((8, k + 1)) for k in range(50)], index=5)
    (step,) = made.steps
    assert step.shards == [(k, 5) for k in range(50)]
    assert step.targets == [(k, 0) for k in range(50)]
    assert step.offsets == []
    assert made.lengths == [1] * 50


def test_one_program_for_each_device():
    made = cuts(rows((8, 3)), rows((6, 2), first=2))
    read = {tuple(step.shards) for step in made.steps}
    assert read == {
        ((0, 0),),
        ((0, 1),),
        *(((0, k), (1, k - 2)) for k in range(2, 8)),
    }


def test_offsets_within_a_shard():
    made = cuts(rows((16, 3)), index=-1)
    (step,) = made.steps
    assert (step.shards, step.offsets) == ([(0, 7)], [1])


def test_elements_of_a_block_share_a_program():
    """Which element it is, is an argument of the program."""
    before = program.cache_info().misses
    array = rows((80, 7))
    for index in range(10):
        cuts(array, index=index)
    assert program.cache_info().misses == before + 1


def test_cuts_are_found_again():
    before = cuts_for.cache_info().hits
    for _ in range(3):
        cuts(rows((8, 9)), index=2)
    assert cuts_for.cache_info().hits == before + 2


def test_what_is_on_no_device_is_indexed():
    made = cuts(np.zeros((8, 3)), jax.numpy.zeros((2, 3)), np.ones((2, 3)), axis=-1)
    assert made.lengths == [3, 3, 3]
    assert [leaf for leaf, _ in made.indexed] == [0, 2]


def test_refusals_tell_the_leaf():
    with pytest.raises(RefusedError, match="index 9 is out of range") as caught:
        cuts(np.zeros(10), np.zeros(9), np.zeros(3), index=9)
    assert caught.value.leaf == 1
    assert caught.value.kind is IndexError
