"""Takes and updates along an axis that is cut: each shard has a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_programs import X, ints, reals

FAR = np.array([3, -9, 7, 0, 25, -1], np.int32)
BYTES = np.array([2, 5, 200], np.uint8)
MODES = ["fill", "clip", "wrap"]


def check(fun, *args, in_slices, tolerance=2e-5):
    made = plan(fun, *args, in_slices=in_slices)
    assert_same(made.run(*args), jax.jit(fun)(*args), tolerance)
    assert made.num_shards > 1
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint16", "bool", "complex64"])
def test_a_table_is_cut_along_the_axis_that_is_looked_up(mode, dtype):
    table = (X * 5).astype(dtype)
    made = check(
        lambda x, i: jnp.take(x, i, axis=0, mode=mode),
        table,
        FAR,
        in_slices=({0: (3, 4, 1), 1: 2}, {0: 2}),
    )
    assert made.num_shards == 3 * 2 * 2


def test_a_lookup_in_two_axes_fills_once():
    def fun(x, i, j):
        return x.at[i, j].get(mode="fill", fill_value=7.0)

    j = np.array([0, 5, 6, -1, 2, 3], np.int32)
    check(fun, X, FAR, j, in_slices=({0: 4, 1: 3}, None, None))


def test_what_is_not_a_number_stays_where_it_is():
    table = np.where(X > 1, np.nan, np.where(X < -1, np.inf, X))
    check(lambda x: x[np.array([7, 1, 1])], table, in_slices=({0: 4},))


def test_an_embedding_layer_and_its_gradient():
    def loss(table, words):
        return (jnp.tanh(table[words]) ** 2).sum()

    words = ints(3, 4, high=8)
    made = check(loss, X, words, in_slices=({0: 4}, None))
    assert len(made.stages) == 2
    check(jax.grad(loss), X, words, in_slices=({0: 4}, None))
    check(jax.grad(loss), X, words, in_slices=(None, {0: 3}))


def test_keys_have_no_parts():
    keys = jax.random.split(jax.random.key(0), 6)

    def fun(keys, i):
        return jax.random.key_data(keys[i])

    made = plan(fun, keys, ints(3, high=6), in_slices=({0: 3}, None))
    assert_same(made.run(keys, ints(3, high=6)), fun(keys, ints(3, high=6)))
    assert "known only when it runs" in made.explain()


@pytest.mark.parametrize("start", [-3, 0, 2, 6, 40])
def test_a_dynamic_slice_gathers_its_parts(start):
    def fun(x, i):
        return lax.dynamic_slice(x, (i, 1), (3, 4))

    check(fun, X, np.int32(start), in_slices=({0: (2, 5, 1), 1: 2}, None))


@pytest.mark.parametrize("start", BYTES)
def test_indices_of_small_types_reach_long_axes(start):
    def fun(x, i, y):
        taken = lax.dynamic_slice(x, (i, jnp.uint8(0)), (280, 2))
        put = lax.dynamic_update_slice(x, y, (i, jnp.uint8(0)))
        return taken, put, x.at[i].add(2.0, mode="clip")

    in_slices = ({0: (7, 200, 93)}, None, None)
    check(fun, reals(300, 2), start, reals(200, 2), in_slices=in_slices)


def test_literal_starts_read_what_they_take():
    def fun(x):
        return lax.dynamic_slice(x, (5, 0), (2, 6))

    made = plan(fun, X, in_slices=({0: 8},))
    assert made.shards[0].in_slices == ((slice(5, 6), slice(0, 6)),)
    assert_same(made.run(X), jax.jit(fun)(X))


@pytest.mark.parametrize("name", ["add", "subtract", "min", "max", "multiply"])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_updates_that_combine_are_cut(name, dtype, mode):
    def fun(x, i, y):
        return getattr(x.at[i], name)(y, mode=mode)

    x, y = (X * 9).astype(dtype), (reals(6, 6, seed=5) * 9).astype(dtype)
    made = check(
        fun, x, FAR, y, in_slices=({0: 3}, {0: (1, 5)}, {0: 2, 1: 2}), tolerance=1e-4
    )
    assert made.num_shards == 3 * 3 * 2


def test_a_segment_sum_over_rows_that_are_cut():
    def fun(x, i):
        return jax.ops.segment_sum(x, i, num_segments=3)

    made = check(fun, X, ints(8, high=3), in_slices=({0: 4}, {0: 4}))
    assert made.num_shards == 4
    assert made.shards[0].combiner == "add"


def test_wide_integers_as_indices():
    with jax.enable_x64(True):
        index = np.array([2**40, -(2**40), 5, 2], np.int64)

        def fun(x, i):
            scattered = x.at[i].add(1.0, mode="drop")
            return x[i[2:]], lax.dynamic_slice(x, (i[0], 0), (2, 3)), scattered

        check(fun, X, index, in_slices=({0: 4}, None))
