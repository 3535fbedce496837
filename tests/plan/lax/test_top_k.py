"""The largest along an axis that is cut."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

VALUES = reals(5, 23)


def test_the_largest_of_pieces():
    shard_plan = check_cut(
        lambda x: lax.top_k(x, 3), VALUES, in_slices=({0: 2, 1: (6, 10, 7)},)
    )
    assert [stage.num_shards for stage in shard_plan.stages] == [6, 2]


def test_equal_ones_stay_in_their_order():
    x = np.round(VALUES).clip(-1, 1)
    for special in (x, np.where(x > 0, np.nan, x), np.full_like(x, -np.inf)):
        shard_plan = plan(lambda x: lax.top_k(x, 4), special, in_slices=({1: 4},))
        want = lax.top_k(special, 4)
        for a, b in zip(shard_plan.run(special), want, strict=True):
            np.testing.assert_array_equal(a, b)
        assert shard_plan.num_shards > 1


def test_of_no_rows():
    shard_plan = check_cut(lambda x: lax.top_k(x, 3), VALUES[:0], in_slices=({1: 3},))
    assert len(shard_plan.stages) == 2


def test_pieces_that_are_too_short_are_read_together():
    shard_plan = check_cut(lambda x: lax.top_k(x, 6), VALUES, in_slices=({1: 8},))
    reads = [shard.in_slices[0][1] for shard in shard_plan.stage_shards(0)]
    assert [s.stop - s.start for s in reads] == [6, 6, 11]
    whole = plan(lambda x: lax.top_k(x, 20), VALUES, in_slices=({1: 2},))
    assert whole.num_shards == 1
    assert "the largest may stand anywhere" in str(whole.explain())


@examples(3)
@given(st.data(), st.sampled_from([1, 3]), st.booleans())
def test_the_largest_in_any_pieces(data, k, gradient):
    def fun(x):
        values, places = lax.top_k(jnp.sin(x), k)
        return values[1:4], places[:, :2]

    def loss(x):
        return (lax.top_k(jnp.sin(x), k)[0] ** 2).sum()

    function = fun if not gradient else jax.grad(loss)
    in_slices = data.draw(cuts((VALUES,)))
    assert_same(
        plan(function, VALUES, in_slices=in_slices).run(VALUES),
        jax.jit(function)(VALUES),
    )


def test_what_is_taken_of_pieces_is_not_kept_whole():
    def nearest(x, y):
        distances = (y * y).sum(1)[None] - 2 * x @ y.T
        return lax.top_k(-distances, 3)[1]

    queries, rows = reals(64, 4), reals(512, 4, seed=5)
    shard_plan = check_cut(nearest, queries, rows, in_slices=(None, {0: 8}))
    assert [stage.num_shards for stage in shard_plan.stages] == [8, 1]
    assert shard_plan.peak_bytes < 64 * 512 * 4
