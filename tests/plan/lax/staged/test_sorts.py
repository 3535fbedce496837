"""Sorts, medians and quantiles along an axis that is cut, or is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmap as sm
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import reals
from tests.strategies import examples

TALL = reals(23, 3)
HOLES = np.where(TALL > 1, np.nan, TALL).astype(np.float16)
CUT = ({0: (4, 12, 7)},)


def places_of(x):
    ordered = jnp.sort(x, 0)
    return {
        "median": jnp.median(x, axis=0),
        "nanmedian": jnp.nanmedian(x, axis=0, keepdims=True),
        "quantile": jnp.quantile(x, jnp.float16(0.3), axis=0, method="nearest"),
        "slice": ordered[2:9:3, 1:],
        "gather": jnp.take_along_axis(ordered, jnp.array([[4, 0, -1]]), 0),
    }


@pytest.mark.deep
def test_places_of_a_sorted_axis():
    """The axis is kept, and cut along another one: not one bit differs."""
    shard_plan = check_cut(places_of, HOLES, in_slices=CUT, tolerance=0)
    assert all(stage.num_shards > 1 for stage in shard_plan.stages)


def test_an_axis_without_another_one_is_sorted_by_one_shard():
    shard_plan = plan(lambda x: jnp.median(x @ x.T), TALL, in_slices=CUT)
    assert_same(shard_plan.run(TALL), jnp.median(TALL @ TALL.T))
    # The product is kept, since what is NaN in it decides, too.
    assert shard_plan.stages[0].num_shards == 9


@pytest.mark.parametrize("dtype", [np.float16, np.float32, jnp.bfloat16])
def test_floats_are_sorted_as_integers_on_cpu(dtype):
    special = [0, np.nan, -np.inf, 1e-3, -1, np.inf, 7, -0.0, -np.nan, 1e-7, -1e-7]
    x = jnp.array([special, special[::-1]], dtype)
    chunked = jax.jit(sm.chunked(lambda x: jnp.sort(x, 1), {0: 2}))
    assert_same(chunked(x), jnp.sort(x, 1), 0)
    assert "TOTALORDER" not in chunked.lower(x).as_text()
    # -0.0 comes before 0.0.
    assert np.signbit(np.float32(chunked(x)[:, 3:5])).tolist() == [[True, False]] * 2


def test_the_first_axis_and_descending():
    check_cut(
        lambda x: jnp.sort(x, 0, descending=True), reals(5, 4, 3), in_slices=({1: 2},)
    )


@examples(2)
@given(st.data(), st.booleans())
def test_a_median_in_any_pieces(data, gradient):
    def spread(x):
        middle = jnp.median(x, axis=0, keepdims=True)
        return jnp.median(jnp.abs(jnp.sin(x) - middle), axis=0)

    fun = jax.grad(lambda x: (spread(x) ** 2).sum()) if gradient else spread
    shard_plan = plan(fun, TALL, in_slices=data.draw(cuts((TALL,))))
    assert_same(shard_plan.run(TALL), jax.jit(fun)(TALL), 1e-5)


def test_a_loop_may_take_what_is_sorted():
    """It has several results, as the search of `jnp.searchsorted`."""

    def fun(x):
        ordered = jnp.sort(x)
        return jnp.searchsorted(ordered, x), jnp.interp(x, ordered, jnp.cumsum(ordered))

    x = np.random.default_rng(0).standard_normal(120).astype(np.float32)
    check_cut(fun, x, in_slices=({0: 3},))


@pytest.mark.parametrize("cut", [{0: 3}, {1: 2}])
def test_a_median_of_no_columns(cut):
    medians = jax.vmap(sm.chunked(lambda x: jnp.median(x, 0), cut))
    assert medians(jnp.zeros((0, 8, 5))).shape == (0, 5)
