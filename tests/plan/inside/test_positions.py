"""Positions of a loop's shards: computed from the counter, or looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.plan.inside.positions import Positions
from shardmap.plan.inside.stage_loops import with_same_steps
from shardmap.plan.plan import plan


def positions_of(fun, shape, in_slices):
    made = plan(fun, jax.ShapeDtypeStruct(shape, np.float32), in_slices=in_slices)
    [stage] = made.stages
    for group in with_same_steps(stage):
        yield stage, group, Positions(group.members)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shape", "in_slices", "looked_up"),
    [
        ((64, 64), {0: 8}, 0),
        ((64, 64), {0: 8, 1: 4}, 0),
        ((67, 61), {0: 8, 1: 4}, 0),
        ((12, 4), {0: (2, 1, 2, 3, 1, 1, 2)}, 1),
    ],
)
def test_positions_are_those_of_the_recipes(shape, in_slices, looked_up):
    most = 0
    for stage, group, positions in positions_of(jnp.sin, shape, in_slices):
        numbers = sorted(n for m in group.members for n in m.numbers.tolist())
        most = max(most, len(positions.rows))
        assert positions.count == len(numbers)
        for k, number in enumerate(numbers):
            counter = positions.first + k
            places = positions.at(counter, [row[k] for row in positions.rows])
            boxes, recipe = stage.walked(number)
            assert places.written == {0: [start for start, _ in boxes[0]]}
            assert places.reads == [[a for a, _ in box] for _, box in recipe.reads]
            assert tuple(places.starts) == recipe.starts
    assert most == looked_up


def test_what_all_shards_have_in_common_is_a_plain_number():
    [(_, _, positions)] = positions_of(jnp.sin, (64, 8), {0: 8})
    places = positions.at(jnp.int32(2), [])
    assert type(places.reads[0][1]) is int


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
