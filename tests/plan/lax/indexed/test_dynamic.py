"""Slices whose start is known only when they run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same, check_cut
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

    made = plan(fun, X, in_slices=({0: 8},))
    assert made.shards[0].in_slices == ((slice(5, 6), slice(0, 6)),)
    assert_same(made.run(X), jax.jit(fun)(X))
