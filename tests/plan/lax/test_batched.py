"""Batch axes and right-hand sides are cut, core axes are whole and say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, cuts
from tests.plan.plan_programs import SQUARES, SYMMETRIC, X, reals
from tests.strategies import examples


def test_a_core_axis_is_whole_and_says_why():
    shard_plan = plan(jnp.linalg.cholesky, SYMMETRIC, in_slices=({0: 2, 2: 5},))
    assert shard_plan.num_shards == 2
    assert "works on the whole of this axis (cut a batch axis" in str(
        shard_plan.explain()
    )
    assert_same(shard_plan.run(SYMMETRIC), jax.jit(jnp.linalg.cholesky)(SYMMETRIC))


def test_a_sort_and_its_places_are_cut_beside_it():
    def fun(x):
        return jnp.argsort(x, 1), jnp.sort(x, 1)

    check_cut(fun, X, in_slices=({0: 4, 1: 2},))


def test_a_sort_along_the_axis_that_is_cut_is_whole():
    with pytest.warns(UserWarning, match="runs as a whole"):
        shard_plan = plan(lambda x: jnp.sort(x, 0), X, in_slices=({0: 4},))
    assert "may move an element anywhere (cut another axis)" in str(
        shard_plan.explain()
    )


# Linear solves

REGULAR = reals(5, 3, 3) + 3 * np.eye(3, dtype=np.float32)
DEFINITE = REGULAR @ REGULAR.swapaxes(1, 2)
RIGHT, SIDES = reals(5, 3, 2, seed=1), reals(3, 7, seed=2)
BATCH = {0: (1, 2, 2)}


def log_density(x, covariance):
    mean = jnp.zeros(3)
    return jax.scipy.stats.multivariate_normal.logpdf(x, mean, covariance)


BATCHED = {
    "cholesky": (jnp.linalg.cholesky, (SYMMETRIC,)),
    "eigh": (lambda x: jnp.linalg.eigh(x)[0], (SYMMETRIC,)),
    "fft of one axis": (lambda x: jnp.abs(jnp.fft.fft(x)), (SQUARES,)),
    "lu": (lambda x: lax.linalg.lu(x), (SQUARES,)),
    "lu permutation": (lambda x: lax.linalg.lu(x)[2], (SQUARES,)),
    "singular values": (lambda x: jnp.linalg.svd(x, compute_uv=False), (SQUARES,)),
    "tridiagonal_solve": (
        lambda x: lax.linalg.tridiagonal_solve(x[..., 0], x[..., 1] + 9, x[..., 2], x),
        (reals(4, 5, 5),),
    ),
    "solve": (jnp.linalg.solve, (REGULAR, RIGHT)),
    "inv": (jnp.linalg.inv, (REGULAR,)),
    "expm": (jax.scipy.linalg.expm, (REGULAR * 0.1,)),
    "det": (jnp.linalg.det, (REGULAR,)),
    "logpdf": (jax.vmap(log_density), (reals(5, 3), DEFINITE)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", BATCHED)
def test_each_piece_of_a_batch_is_computed_alone(name):
    fun, args = BATCHED[name]
    cut = {0: (1, len(args[0]) - 1)}
    shard_plan = check_cut(fun, *args, in_slices=(cut,) * len(args), tolerance=2e-4)
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (2, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["solve", "logpdf"])
def test_the_gradient_of_a_solve(name):
    fun, args = BATCHED[name]
    gradient = jax.grad(lambda *args: (fun(*args) ** 2).sum(), (0, 1))
    shard_plan = check_cut(gradient, *args, in_slices=(BATCH, BATCH), tolerance=2e-3)
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (3, 1)


def by_cholesky(a, b):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b)


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [jnp.linalg.solve, by_cholesky])
@pytest.mark.parametrize("how", ["call", "gradient"])
def test_right_hand_sides_are_solved_alone(fun, how):
    if how == "gradient":
        inner = fun
        fun = jax.grad(lambda a, b: (inner(a, b) ** 2).sum(), 1)
    args = DEFINITE[0], SIDES
    shard_plan = check_cut(fun, *args, in_slices=(None, {1: (2, 1, 4)}), tolerance=2e-3)
    assert shard_plan.num_shards == 3


@pytest.mark.parametrize("left", [True, False])
def test_rows_of_a_triangular_solve(left):
    def fun(a, b):
        return jax.lax.linalg.triangular_solve(a, b, left_side=left, lower=True)

    b = SIDES if left else SIDES.T
    check_cut(fun, DEFINITE[0], b, in_slices=(None, {int(left): (2, 5)}))


@examples(2)
@given(st.data(), st.sampled_from(["det", "inv", "solve"]))
def test_solves_under_any_cut(data, name):
    fun, args = BATCHED[name]
    shard_plan = plan(fun, *args, in_slices=data.draw(cuts(args)))
    assert_same(shard_plan.run(*args), jax.jit(fun)(*args), 1e-3)
