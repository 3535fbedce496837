"""Reductions over parts of one axis: groups in time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import reals

DAYS = reals(96, 3)
DAYS[5, 1] = np.nan
MONTHS = [np.flatnonzero(np.arange(96) // 4 % 6 == k) for k in range(6)]
EDGES = [0, 7, 9, 20, 33, 40, 55, 70, 71, 90, 96]
SPANS = [slice(a, b) for a, b in itertools.pairwise(EDGES)]


def stacked(reduction, places):
    return lambda x: jnp.stack([reduction(x[p]) for p in places])


REDUCTIONS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "largest": lambda x: x.max(0),
    "smallest": lambda x: jnp.exp(x).min(0),
    "product": lambda x: (x * 0.5 + 1).prod(0),
    "mean without NaN": lambda x: jnp.nanmean(x, 0),
    "of all axes": lambda x: jnp.nanmean(x),
    "of counts": lambda x: (x > 0).sum(0),
}


CASES = [*((name, MONTHS) for name in REDUCTIONS), ("mean", SPANS), ("largest", SPANS)]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "places"), CASES)
def test_each_row_is_read_once(name, places):
    shard_plan = check_cut(stacked(REDUCTIONS[name], places), DAYS, in_slices={0: 4})
    assert [stage.num_shards for stage in shard_plan.stages] == [4, 1]
    rows = [shard.in_slices[0][0] for shard in shard_plan.shards[:4]]
    assert sum(each.stop - each.start for each in rows) < 1.2 * 96


def test_shards_of_months_share_a_function():
    shard_plan = plan(stacked(REDUCTIONS["mean"], MONTHS), DAYS, in_slices={0: 4})
    assert "functions compiled" not in str(shard_plan)


def test_many_spans_in_order_give_pieces_and_not_parts():
    spans = [slice(k, k + 4) for k in range(0, 96, 4)]
    shard_plan = check_cut(stacked(REDUCTIONS["mean"], spans), DAYS, in_slices={0: 6})
    assert [shard.in_slices[0][0] for shard in shard_plan.shards[:6]] == [
        slice(16 * k, 16 * k + 16) for k in range(6)
    ]


@pytest.mark.deep
def test_groups_may_share_rows_or_leave_them_out():
    for name, length, starts, most in (
        ("sum", 12, range(0, 84, 3), 9),
        ("largest", 15, (2, 40, 20, 60), 5),
    ):
        spans = [slice(k, k + length) for k in starts]
        shard_plan = check_cut(stacked(REDUCTIONS[name], spans), DAYS, in_slices={0: 4})
        assert 4 < shard_plan.num_shards <= most


@pytest.mark.filterwarnings("ignore:plan. the function runs as a whole")
def test_few_rows_are_read_alone():
    spans = [slice(k, k + 3) for k in (2, 40, 20, 60)]
    shard_plan = plan(stacked(REDUCTIONS["sum"], spans), DAYS, in_slices={0: 4})
    assert shard_plan.peak_bytes < DAYS.nbytes / 2


def test_groups_of_another_axis():
    def fun(x):
        return jnp.stack([x[:, p].mean(1) for p in MONTHS], 1)

    x = reals(4, 96, 2)
    shard_plan = check_cut(fun, x, in_slices={1: 4})
    assert [stage.num_shards for stage in shard_plan.stages] == [4, 1]
    shard_plan = check_cut(fun, x, in_slices={0: 2, 1: 4})
    assert [stage.num_shards for stage in shard_plan.stages] == [8, 2]


def test_rows_of_rows():
    def fun(x):
        return jnp.stack([(2 * x[10:90])[p].sum(0) for p in SPANS[:6]])

    shard_plan = check_cut(fun, DAYS, in_slices={0: 4})
    assert len(shard_plan.stages[0].results) == 1


def test_what_is_done_with_groups_stays_if_they_are_not_stacked():
    def fun(x):
        first, *others = (x[p].sum(0) for p in SPANS)
        return first, sum(others) / first, jnp.stack([*others[::-1], first + 1])

    shard_plan = check_cut(fun, np.nan_to_num(DAYS), in_slices={0: 4})
    assert [stage.num_shards for stage in shard_plan.stages] == [4, 1]


def test_anomalies_read_twice():
    month = np.arange(96) // 4 % 6

    def fun(x):
        return x - stacked(REDUCTIONS["mean without NaN"], MONTHS)(x)[month]

    shard_plan = check_cut(fun, DAYS, in_slices={0: 4})
    assert [stage.num_shards for stage in shard_plan.stages] == [4, 4]
    assert "args[0] twice" in str(shard_plan)


def test_a_cut_of_other_axes_needs_one_stage():
    fun = stacked(REDUCTIONS["mean without NaN"], MONTHS)
    shard_plan = check_cut(fun, DAYS, in_slices={1: 3})
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (3, 1)


@pytest.mark.deep
def test_days_of_a_year_are_told_little():
    x = np.zeros((3660, 64), np.float32)
    days = [np.arange(k, 3660, 366) for k in range(366)]
    shard_plan = plan(stacked(REDUCTIONS["mean"], days), x, in_slices={0: 10})
    assert shard_plan.peak_bytes < x.nbytes / 2
    assert [stage.num_shards for stage in shard_plan.stages] == [10, 1]


def test_chunked():
    fun = stacked(REDUCTIONS["mean"], MONTHS)
    assert_same(sm.chunked(fun, {0: 4})(DAYS), fun(DAYS))


def test_long_sums_keep_their_digits():
    """A scatter adds row after row: of many rows it would lose digits."""
    x = np.random.default_rng(0).random(200_000, np.float32) + 1
    quarters = [slice(k, None, 4) for k in range(4)]
    shard_plan = plan(stacked(jnp.mean, quarters), x, in_slices={0: 2})
    assert [stage.num_shards for stage in shard_plan.stages] == [2, 1]
    want = [x[p].mean(dtype=np.float64) for p in quarters]
    np.testing.assert_allclose(shard_plan.run(x), want, rtol=5e-7)


def test_sums_of_half_precision_are_rounded_once():
    ones = jnp.ones(8192, jnp.bfloat16)
    fun = stacked(
        lambda x: jax.lax.reduce_sum(x, (0,)), [slice(k, None, 4) for k in range(4)]
    )
    assert plan(fun, ones, in_slices={0: 2}).run(ones).tolist() == [2048] * 4


def test_rows_that_something_else_reads_stay_apart():
    """The deviations of each month read its rows again, whatever the means read."""
    shard_plan = check_cut(
        stacked(lambda x: x.std(0), MONTHS), np.nan_to_num(DAYS), in_slices={0: 4}
    )
    assert "scatter" not in str(shard_plan.explain())


BLOCKS = [slice(k, k + 200) for k in range(0, 2400, 200)]


@pytest.mark.deep
def test_a_mean_beside_a_sum_adds_once():
    def fun(x):
        return jnp.stack([x[p].mean(0) + x[p].sum(0) for p in BLOCKS])

    shard_plan = check_cut(fun, reals(2400, 3), in_slices={0: 16})
    assert str(shard_plan).count("gives parts of the scatter-add") == 1
