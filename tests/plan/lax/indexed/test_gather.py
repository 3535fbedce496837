"""Lookups along an axis that is cut: each shard has a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import X, ints

FAR = np.array([3, -9, 7, 0, 25, -1], np.int32)
MODES = ["fill", "clip", "wrap"]


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint16", "bool", "complex64"])
def test_a_table_is_cut_along_the_axis_that_is_looked_up(mode, dtype):
    table = (X * 5).astype(dtype)
    shard_plan = check_cut(
        lambda x, i: jnp.take(x, i, axis=0, mode=mode),
        table,
        FAR,
        in_slices=({0: (3, 4, 1), 1: 2}, {0: 2}),
    )
    assert shard_plan.num_shards == 3 * 2 * 2


def test_a_lookup_in_two_axes_fills_once():
    def fun(x, i, j):
        return x.at[i, j].get(mode="fill", fill_value=7.0)

    j = np.array([0, 5, 6, -1, 2, 3], np.int32)
    check_cut(fun, X, FAR, j, in_slices=({0: 4, 1: 3}, None, None))


def test_what_is_not_a_number_stays_where_it_is():
    table = np.where(X > 1, np.nan, np.where(X < -1, np.inf, X))
    check_cut(lambda x: x[np.array([7, 1, 1])], table, in_slices=({0: 4},))


def test_an_embedding_layer_and_its_gradient():
    def loss(table, words):
        return (jnp.tanh(table[words]) ** 2).sum()

    words = ints(3, 4, high=8)
    shard_plan = check_cut(loss, X, words, in_slices=({0: 4}, None))
    assert len(shard_plan.stages) == 2
    check_cut(jax.grad(loss), X, words, in_slices=({0: 4}, None))
    check_cut(jax.grad(loss), X, words, in_slices=(None, {0: 3}))


def test_keys_have_no_parts():
    keys = jax.random.split(jax.random.key(0), 6)

    def fun(keys, i):
        return jax.random.key_data(keys[i])

    shard_plan = plan(fun, keys, ints(3, high=6), in_slices=({0: 3}, None))
    assert_same(shard_plan.run(keys, ints(3, high=6)), fun(keys, ints(3, high=6)))
    assert "known only when it runs" in str(shard_plan.explain())


def test_wide_integers_as_indices():
    with jax.enable_x64(True):
        index = np.array([2**40, -(2**40), 5, 2], np.int64)

        def fun(x, i):
            scattered = x.at[i].add(1.0, mode="drop")
            return x[i[2:]], lax.dynamic_slice(x, (i[0], 0), (2, 3)), scattered

        check_cut(fun, X, index, in_slices=({0: 4}, None))


def cross_entropy(logits, labels):
    rows = jnp.arange(logits.shape[0])
    picked = jax.nn.log_softmax(logits)[rows, labels]
    return -picked.mean(), picked


LABELS = ints(8, high=6)


@pytest.mark.few(1)
@pytest.mark.parametrize("cuts", [({0: 4}, None), ({0: 4}, {0: 4}), (None, {0: 2})])
def test_an_index_that_counts_rows_is_a_loop_over_them(cuts):
    shard_plan = check_cut(cross_entropy, X, LABELS, in_slices=cuts)
    assert shard_plan.num_shards == (cuts[0] or cuts[1])[0]
    check_cut(jax.grad(lambda *a: cross_entropy(*a)[0]), X, LABELS, in_slices=cuts)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_counted_rows_and_columns_that_are_cut(mode):
    def fun(x, i):
        return x.at[jnp.arange(8), i].get(mode=mode)

    inside = LABELS if mode != "fill" else FAR[[0, 1, 2, 3, 4, 5, 0, 1]]
    shard_plan = check_cut(fun, X, inside, in_slices=({0: (3, 4, 1), 1: 2}, None))
    assert shard_plan.num_shards == 3 * 2


@pytest.mark.deep
def test_counts_that_are_no_places_of_all_rows():
    for rows in (
        lambda: jnp.arange(7),
        lambda: jnp.arange(8) + 1,
        lambda: jnp.arange(8) - 3,
        lambda: jnp.arange(8)[::-1],
        lambda: jnp.arange(8) * 2,
    ):
        check_cut(
            lambda x, i: x[rows(), i[: rows().size]],  # noqa: B023
            X,
            LABELS,
            in_slices=({0: 4}, None),
        )


EXTREMES = {
    "int8": [-128, 127],
    "uint8": [0, 255],
    "uint32": [0, 2**32 - 1],
    "int64": [-(2**63), 2**63 - 1],
    "uint64": [0, 2**64 - 1],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", EXTREMES)
def test_places_of_any_integers(dtype):
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))

    def taken(x, i):
        return lax.gather(x, i[:, None], numbers, (1,))

    with jax.enable_x64(True):
        i = np.array([3, 1, 0, 7, *EXTREMES[dtype]], dtype)
        check_cut(taken, np.arange(12.0), i, in_slices=({0: 3}, {0: 2}))
