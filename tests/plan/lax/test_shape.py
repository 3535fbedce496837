"""Elements that move: each shard reads what comes to stand in its box."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import check_cut, slices, times_read
from tests.plan.plan_programs import X, Y, reals


def read(shard_plan):
    return [shard.in_slices[0][0] for shard in shard_plan.shards]


def test_a_reversed_axis_is_read_from_its_end():
    shard_plan = check_cut(lambda x: x[::-1], X, in_slices=({0: (3, 5)},))
    assert sorted(read(shard_plan), key=lambda s: s.start) == [slice(0, 3), slice(3, 8)]
    assert read(shard_plan)[0] == slice(3, 8)


def test_a_strided_slice_reads_no_more_than_its_span():
    shard_plan = check_cut(lambda x: x[1::3], X, in_slices=({0: 3},))
    assert all(part.stop - part.start <= 4 for part in read(shard_plan))


def test_a_sum_passes_zeros_around_it_and_nothing_else():
    def zeros(x):
        return lax.pad(x.sum(0), 0.0, ((2, 1, 0),))

    def ones(x):
        return lax.pad(x.sum(0), 1.0, ((2, 1, 0),))

    assert len(check_cut(zeros, X, in_slices=({0: 4},)).stages) == 1
    assert len(check_cut(ones, X, in_slices=({0: 4},)).stages) == 2


def test_joined_arrays_are_cut_at_their_seams():
    shard_plan = check_cut(
        lambda x, y: jnp.concatenate([x, y]), X, Y, in_slices=({0: 2}, None)
    )
    assert shard_plan.out_slices == {0: [(0, 4), (4, 8), (8, 16)]}
    # A shard reads nothing of what does not reach it.
    assert shard_plan.shards[0].in_slices[1] is None
    assert shard_plan.shards[2].in_slices[0] is None


def test_parts_pass_a_concatenation_of_parts_only():
    def parts(x, y):
        return jnp.concatenate([x.sum(0), y.sum(0)])

    def mixed(x, y):
        return jnp.concatenate([x.sum(0), y[0]])

    in_slices = ({0: 2}, {0: 2})
    for fun in (parts, mixed):
        shard_plan = plan(fun, X, Y, in_slices=in_slices)
        np.testing.assert_allclose(shard_plan.run(X, Y), jax.jit(fun)(X, Y), rtol=1e-5)


@pytest.mark.parametrize("copies", [(3, 1), (1, 40), (20, 2)])
def test_tiles_few_and_many(copies):
    check_cut(lambda x: jnp.tile(x, copies), X, in_slices=({0: 2, 1: 3},))


def test_splits_read_their_own_part():
    shard_plan = check_cut(lambda x: jnp.split(x, [3, 4]), X, in_slices=({1: 2},))
    assert shard_plan.shards[0].in_slices == (slices((0, 8), (0, 3)),)


def test_positions_start_where_a_shard_does():
    shard_plan = check_cut(
        lambda x: x * lax.broadcasted_iota(jnp.float32, (8, 6), 0),
        X,
        in_slices=({0: 4},),
    )
    assert len({shard.function for shard in shard_plan.shards}) == 1


def test_a_change_of_width_has_its_words_whole():
    shard_plan = check_cut(
        lambda x: lax.bitcast_convert_type(x, jnp.uint8), X, in_slices=({0: 4},)
    )
    assert shard_plan.out_slices[0] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    back = np.asarray(lax.bitcast_convert_type(X, jnp.uint8))
    whole = plan(
        lambda b: lax.bitcast_convert_type(b, jnp.float32), back, in_slices=({2: 2},)
    )
    assert "the parts of one element" in str(whole.explain())


@pytest.mark.parametrize("shifts", [(1, 0, -1, 0), (3, -2, 0, 1, -1, 0, 2, -3)])
def test_shifts_in_all_directions_read_their_own_parts(shifts):
    """As the streaming of a lattice gas. Pieces at the borders read many boxes."""

    def step(f):
        return (
            jnp.stack([jnp.roll(each, n, 0) for each, n in zip(f, shifts, strict=True)])
            * 0.9
        )

    shard_plan = check_cut(
        lambda f: step(step(f)), reals(len(shifts), 120, 2), in_slices=({1: 6},)
    )
    assert times_read(shard_plan) < 1.3


def test_partial_sums_that_follow_each_other_are_partial():
    def fun(x):
        return jnp.concatenate([x.sum(0), (x * x).sum(0)])

    shard_plan = check_cut(fun, X, in_slices=({0: 2},))
    assert len(shard_plan.stages) == 1
