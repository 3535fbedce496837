"""Medians, quantiles and other places of a sorted axis that is cut."""

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
# Of 16 bits: four digits are found sooner than eight.
HOLES = np.where(TALL > 1, np.nan, TALL).astype(np.float16)
CUT = ({0: (4, 12, 7)},)


def check_equal(fun, *args, in_slices=CUT):
    """Not one bit differs, and every stage that reads the argument is cut."""
    made = plan(fun, *args, in_slices=in_slices)
    got, want = made.run(*args), jax.jit(fun)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(stage.num_shards > 1 for stage in made.stages[:-1])
    return made


def deep(value):
    return pytest.param(value, marks=pytest.mark.deep)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [
        deep(lambda x: jnp.median(x)),
        lambda x: jnp.median(x, axis=0),
        deep(lambda x: jnp.quantile(x, jnp.float16(0.3), axis=0, method="nearest")),
        deep(lambda x: jnp.nanmedian(x, axis=0, keepdims=True)),
        lambda x: jnp.sort(x, 0)[2:9:3, 1:],
        lambda x: jnp.take_along_axis(jnp.sort(x, 0), jnp.array([[4, 0, -1]]), 0),
    ],
)
def test_places_of_a_sorted_axis(fun):
    check_equal(fun, HOLES)


@pytest.mark.deep
def test_places_that_are_arguments():
    made = check_equal(
        lambda x, k, places: (jnp.sort(x, 0)[k], jnp.sort(x, 0)[places]),
        *(TALL, np.int32(7), np.array([3, -1, 50], np.int32)),
        in_slices=(CUT[0], None, None),
    )
    assert [stage.num_shards for stage in made.stages] == [3] * 8 + [1]


@pytest.mark.deep
def test_quantiles_between_elements():
    x = TALL.astype(np.float16)
    places = jnp.array([0.1, 0.5, 0.95], np.float16)
    made = plan(lambda x: jnp.quantile(x, places, axis=0), x, in_slices=CUT)
    assert_same(made.run(x), jnp.quantile(x, places, axis=0), 1e-3)


def test_wide_rows_are_counted_alike():
    x = reals(2, 31, 128).astype(np.float16)
    places = jnp.array([17, 3])
    check_equal(lambda x: jnp.sort(x, 1)[:, places], x, in_slices=({0: 2, 1: 3},))


@pytest.mark.parametrize("dtype", [np.int8, deep(np.uint16), deep(jnp.bfloat16)])
def test_numbers_of_all_kinds(dtype):
    x = (TALL * 40).astype(dtype)
    made = check_equal(lambda x: jnp.sort(x, 0)[jnp.array([0, 5, 22])], x)
    assert len(made.stages) == 1 + 2 * x.dtype.itemsize


@pytest.mark.deep
def test_nothing_as_large_as_the_argument_is_kept():
    x = reals(4000).astype(np.float16)
    # A shard compares its piece with 15 numbers.
    made = plan(jnp.median, x, in_slices=({0: 16},))
    assert made.peak_bytes < x.nbytes
    np.testing.assert_array_equal(made.run(x), jnp.median(x))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.median(x, axis=1),
        deep(lambda x: jnp.nanmedian(x, axis=1, keepdims=True)),
        deep(lambda x: jnp.sort(x, 1)[:, ::2]),
        lambda x: jnp.take_along_axis(jnp.sort(x, 1), jnp.full((23, 2), 1), 1),
    ],
)
def test_an_axis_that_is_not_cut_is_not_sorted_either(fun):
    made = check_equal(fun, HOLES)
    assert len(made.stages) == 1
    text = jax.jit(sm.chunked(fun, CUT)).lower(HOLES).as_text()
    assert "stablehlo.sort" not in text


def test_special_numbers_stand_where_a_sort_puts_them():
    x = np.array([0, np.nan, -np.inf, 1e-3, -1, np.inf, -0.0, -np.nan], np.float16)
    # Not in their order, which would take the sorted axis as it is.
    places = jnp.array([7, 6, 0, 1, 2, 3, 4, 5])
    made = check_equal(lambda x: jnp.sort(x)[places], x, in_slices=({0: (3, 4, 1)},))
    assert len(made.stages) == 5


@examples(2)
@given(st.data(), st.booleans())
def test_a_median_in_any_pieces(data, gradient):
    def spread(x):
        middle = jnp.median(x, axis=0, keepdims=True)
        return jnp.median(jnp.abs(jnp.sin(x) - middle), axis=0)

    fun = jax.grad(lambda x: (spread(x) ** 2).sum()) if gradient else spread
    x = TALL.astype(np.float16)
    made = plan(fun, x, in_slices=data.draw(cuts((x,))))
    assert_same(made.run(x), jax.jit(fun)(x), 1e-2)


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
