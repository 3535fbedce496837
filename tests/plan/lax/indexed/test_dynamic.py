"""Slices whose start is known only when they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, times_read
from tests.plan.plan_programs import X, reals

BYTES = np.array([2, 5, 200], np.uint8)


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [-3, 0, 2, 6, 40])
def test_a_dynamic_slice_gathers_its_parts(start):
    def fun(x, i):
        return lax.dynamic_slice(x, (i, 1), (3, 4))

    check_cut(fun, X, np.int32(start), in_slices=({0: (2, 5, 1), 1: 2}, None))


@pytest.mark.few(1)
@pytest.mark.parametrize("start", BYTES)
def test_indices_of_small_types_reach_long_axes(start):
    def fun(x, i, y):
        taken = lax.dynamic_slice(x, (i, jnp.uint8(0)), (280, 2))
        put = lax.dynamic_update_slice(x, y, (i, jnp.uint8(0)))
        return taken, put, x.at[i].add(2.0, mode="clip")

    in_slices = ({0: (7, 200, 93)}, None, None)
    check_cut(fun, reals(300, 2), start, reals(200, 2), in_slices=in_slices)


def test_literal_starts_read_what_they_take():
    def fun(x):
        return lax.dynamic_slice(x, (5, 0), (2, 6))

    shard_plan = plan(fun, X, in_slices=({0: 8},))
    assert shard_plan.shards[0].in_slices == ((slice(5, 6), slice(0, 6)),)
    assert_same(shard_plan.run(X), jax.jit(fun)(X))


TABLE = reals(120, 8)


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [-500, -110, -7, 0, 3, 60, 999])
@pytest.mark.parametrize("cut", [{0: 10}, {0: (1, 50, 7, 62)}, {0: 4, 1: 2}])
def test_updates_at_literal_starts_are_cut(start, cut):
    def fun(x):
        along = lax.dynamic_update_slice_in_dim(x, x[:-4] * 2, start, 0)
        return along, lax.dynamic_update_slice(x, jnp.sin(x[5:65, 1:5]), (start, 3))

    shard_plan = check_cut(fun, TABLE, in_slices=(cut,))
    assert shard_plan.num_shards == np.prod(
        [n if type(n) is int else 4 for n in cut.values()]
    )
    assert "known only when it runs" not in str(shard_plan)
    assert_same(chunked(fun, (cut,))(TABLE), jax.jit(fun)(TABLE))


def test_pieces_read_their_part_of_updates():
    def fun(x):
        return lax.dynamic_update_slice_in_dim(x, x[:-1] * 2, 1, 0)

    shard_plan = check_cut(fun, TABLE, in_slices=({0: 10},))
    assert times_read(shard_plan) < 1.1
    assert shard_plan.peak_bytes < TABLE.nbytes / 2


def test_computed_starts_are_known():
    def fun(x):
        start = jnp.int32(-2) * 10 + len(x)
        return lax.dynamic_update_slice_in_dim(x, x[:10] + 1, start, 0)

    shard_plan = check_cut(fun, TABLE, in_slices=({0: 6},))
    assert times_read(shard_plan) < 1.1


def test_a_loop_updates_its_inside():
    def step(x):
        inner = x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2]
        return lax.dynamic_update_slice(x, inner / 4, (1, 1))

    def counted(x):
        return lax.fori_loop(0, 4, lambda _, x: step(x), x)

    def scanned(x):
        return lax.scan(lambda x, _: (step(x), x[5]), x, None, length=4)

    for fun in (counted, scanned):
        shard_plan = check_cut(fun, TABLE, in_slices=({0: (50, 40, 30)},))
        assert (shard_plan.num_shards, len(shard_plan.stages)) == (3, 1)
        assert times_read(shard_plan) < 1.4


def test_only_one_start_is_known():
    def fun(x, k):
        return lax.dynamic_update_slice(x, jnp.sin(x[:60, :4]), (7, k))

    shard_plan = check_cut(fun, TABLE, np.int32(2), in_slices=({0: (50, 40, 30)}, None))
    assert times_read(shard_plan, slice(1)) < 1.1


def test_of_unknown_starts_it_is_said():
    def fun(x, k):
        return lax.dynamic_update_slice_in_dim(x, x[:-1] * 2, k, 0)

    shard_plan = check_cut(fun, TABLE, np.int32(1), in_slices=({0: 10}, None))
    assert shard_plan.num_shards == 10
    assert "only when it runs (cut only the operand, or another axis)" in str(
        shard_plan
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [-2, 4, 40])
def test_updates_of_keys_at_unknown_places(start):
    keys = jax.random.split(jax.random.key(0), 12)

    def fun(keys, k):
        put = lax.dynamic_update_slice_in_dim(keys, keys[:3], k, 0)
        return jax.random.key_data(put)

    check_cut(fun, keys, np.int32(start), in_slices=({0: 5}, None))
