"""Windows at known places are slices, and updates of slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts, times_read
from tests.plan.plan_programs import reals
from tests.strategies import examples

TABLE = reals(12, 5)


def diffused(x):
    return x.at[1:-1].add(0.1 * (x[2:] - 2 * x[1:-1] + x[:-2]))


UPDATES = {
    "add": diffused,
    "set": lambda x: x.at[2:9, 1:3].set(x[:7, :2]),
    "multiply": lambda x: x.at[3, 2:4].multiply(x[0, :2]),
    "min": lambda x: x.at[4:].min(0.2),
    "subtract": lambda x: x.at[:5].subtract(x[1:6]),
    "far": lambda x: x.at[20:].add(1.0),
    "edges": lambda x: x.at[0].set(x[1] * 2).at[-1, 1:-1].add(x[-3, 1:-1]),
    "constant": lambda x: x * jnp.zeros_like(x).at[1:-1].set(1.0),
    "rows": lambda x: x.at[jnp.array([7, 2, 9]), 1:-1].add(x[:3, 2:]),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UPDATES)
def test_a_window_is_updated_in_pieces(name):
    shard_plan = check_cut(UPDATES[name], TABLE, in_slices=({0: (3, 4, 5)},))
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (3, 1)


def test_a_loop_of_updates():
    def fun(x):
        return lax.fori_loop(0, 3, lambda _, x: diffused(x), x)

    shard_plan = check_cut(fun, TABLE, in_slices=({0: (3, 4, 5)},))
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (3, 1)


@examples(4)
@given(st.data(), st.sampled_from(sorted(UPDATES)))
def test_updates_under_any_cut(data, name):
    shard_plan = plan(UPDATES[name], TABLE, in_slices=data.draw(cuts((TABLE,))))
    assert_same(shard_plan.run(TABLE), jax.jit(UPDATES[name])(TABLE))


def laplacian(x):
    inner = x[1:-1, 1:-1]
    return x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2] - 4 * inner


def at_rest(c):
    rest = jnp.zeros_like(c)
    return c * rest.at[1:-1, 1:-1].set(laplacian(rest) + 1)


CONSTANT = {
    "set": lambda c: c * jnp.zeros_like(c).at[1:-1].set(1.0),
    "two axes": at_rest,
    "a column": lambda c: c * jnp.zeros_like(c).at[7:-5, 3].add(2.0),
}
WAVES = reals(300, 40)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize("cut", [{0: 10}, {0: (9, 30, 1, 160, 100)}, {0: 6, 1: 2}])
def test_updated_constants_are_computed_in_pieces(name, cut):
    fun = CONSTANT[name]
    shard_plan = check_cut(fun, WAVES, in_slices=(cut,))
    longest = max(
        box[0].stop - box[0].start for [box] in (s.in_slices for s in shard_plan.shards)
    )
    assert shard_plan.peak_bytes < 9 * longest * WAVES.nbytes / len(WAVES)
    assert times_read(shard_plan) == 1
    assert_same(chunked(fun, (cut,))(WAVES), jax.jit(fun)(WAVES))


def waves(c, first):
    def step(two, _):
        now, before = two
        inner = jnp.zeros_like(now).at[1:-1, 1:-1].set(laplacian(now))
        return (2 * now - before + 0.1 * jnp.sin(c) * (1 + inner), now), None

    return lax.scan(step, (first, first), None, length=4)[0][0]


@pytest.mark.deep
def test_waves_from_rest_are_cut_as_any_others():
    def from_rest(c):
        return waves(c, jnp.zeros_like(c))

    shard_plan = check_cut(from_rest, WAVES, in_slices=({0: 10},))
    other = check_cut(lambda c: waves(c, c), WAVES, in_slices=({0: 10},))
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (10, 1)
    # The zeros of one piece come to it.
    assert shard_plan.peak_bytes <= other.peak_bytes + 38 * 40 * 4
    assert_same(chunked(from_rest, {0: 7})(WAVES), jax.jit(from_rest)(WAVES))


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", [{0: 10}, {0: 5, 1: 2}])
def test_only_pieces_at_the_edges_compute_them(cut):
    def step(x):
        x = x.at[1:-1, 1:-1].add(0.1 * laplacian(x))
        return x.at[0].set(x[1]).at[-1, 1:-1].set(x[-2, 1:-1])

    def fun(x):
        return lax.fori_loop(0, 5, lambda _, x: step(x), x)

    shard_plan = check_cut(fun, WAVES, in_slices=(cut,))
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (10, 1)
    assert times_read(shard_plan) < 1.7


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [-50, -3, 2, 40])
def test_vectorized_updates_at_literal_starts_are_cut(start):
    def fun(x, y):
        def put(x, y):
            return lax.dynamic_update_slice(x, jnp.sin(y), (start, 1))

        return jax.vmap(put)(x, y)

    args = reals(3, 12, 5), reals(3, 4, 2, seed=1)
    shard_plan = check_cut(fun, *args, in_slices=({1: (3, 4, 5), 2: 2}, {1: 3}))
    assert shard_plan.num_shards == 6
    assert "known only when it runs" not in str(shard_plan)


def test_of_windows_at_unknown_places_it_is_said():
    def fun(x, y, k):
        def put(x, y, k):
            return lax.dynamic_update_slice(x, y, (k, 0))

        return jax.vmap(put)(x, y, k)

    args = reals(3, 12, 5), reals(3, 4, 5, seed=1), np.array([2, -3, 40], np.int32)
    shard_plan = plan(fun, *args, in_slices=({1: 3, 2: 5}, {1: 2}, None))
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args))
    assert shard_plan.num_shards == 5
    assert "or partly outside (cut another axis)" in str(shard_plan)


def test_windows_without_an_index_start_at_the_first_place():
    numbers = lax.ScatterDimensionNumbers((0, 1), (), ())

    def fun(x, y):
        return lax.scatter_add(x, jnp.zeros(0, jnp.int32), y, numbers)

    args = TABLE, reals(7, 3, seed=1)
    shard_plan = check_cut(fun, *args, in_slices=({0: (3, 4, 5), 1: 2}, None))
    assert shard_plan.num_shards == 6
