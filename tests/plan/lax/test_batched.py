"""Batch axes are cut, core axes are whole and say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.plan.plan import plan
from tests.plan.checks import assert_same, check_cut
from tests.plan.plan_programs import SQUARES, SYMMETRIC, X, reals

CASES = {
    "cholesky": (jnp.linalg.cholesky, SYMMETRIC),
    "eigh": (lambda x: jnp.linalg.eigh(x)[0], SYMMETRIC),
    "fft of one axis": (lambda x: jnp.abs(jnp.fft.fft(x)), SQUARES),
    "lu": (lambda x: lax.linalg.lu(x), SQUARES),
    "lu permutation": (lambda x: lax.linalg.lu(x)[2], SQUARES),
    "singular values": (lambda x: jnp.linalg.svd(x, compute_uv=False), SQUARES),
    "tridiagonal_solve": (
        lambda x: lax.linalg.tridiagonal_solve(x[..., 0], x[..., 1] + 9, x[..., 2], x),
        reals(4, 5, 5),
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_a_batch_axis_is_cut(name):
    fun, x = CASES[name]
    made = check_cut(fun, x, in_slices=({0: (1, 3)},), tolerance=1e-4)
    assert made.num_shards == 2


def test_a_core_axis_is_whole_and_says_why():
    made = plan(jnp.linalg.cholesky, SYMMETRIC, in_slices=({0: 2, 2: 5},))
    assert made.num_shards == 2
    assert "works on the whole of this axis (cut a batch axis" in made.explain()
    assert_same(made.run(SYMMETRIC), jax.jit(jnp.linalg.cholesky)(SYMMETRIC))


def test_the_axes_before_those_of_a_transform_are_cut():
    def fun(x):
        return jnp.abs(jnp.fft.fft2(x))

    assert check_cut(fun, SQUARES, in_slices=({0: 4, 1: 5},)).num_shards == 4


def test_a_sort_and_its_places_are_cut_beside_it():
    def fun(x):
        return jnp.argsort(x, 1), jnp.sort(x, 1)

    check_cut(fun, X, in_slices=({0: 4, 1: 2},))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_largest_of_each_row(k):
    check_cut(lambda x: lax.top_k(x, k), X, in_slices=({0: 4},))


def test_several_arrays_are_sorted_together():
    def fun(x, y):
        return lax.sort((x, y), dimension=0)

    check_cut(fun, np.round(X), X, in_slices=({1: 2}, {1: 3}))
