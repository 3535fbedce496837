"""Reductions on CPU: as accurate, and what they are computed from is not stored."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmap as sm
from shardmap._jax.walk import jaxprs_in
from shardmap.plan.lax import cpu_reductions
from shardmap.plan.plan import plan
from tests.plan.checks import assert_same
from tests.plan.plan_random import random_program
from tests.strategies import examples

LONG = (40, 256, 128)
FIELD = np.random.default_rng(0).standard_normal(LONG, np.float32)
MEAN = FIELD.mean(0)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """As if the compiler were slow, whatever it is."""
    monkeypatch.setattr(cpu_reductions, "SLOW_LEADING_SUMS", True)


def anomaly(u):
    weights = jnp.arange(u.shape[0], dtype=u.dtype) + 1
    return (weights[:, None, None] * (u - MEAN[None]) ** 2).sum(0)


def months(u, method="add"):
    """Of each month of a series, its positive elements."""
    found = jnp.zeros((6, *u.shape[1:]), u.dtype)
    month = np.arange(u.shape[0]) // 3 % 6
    return getattr(found.at[month], method)(jnp.where(u > 0, u, 0))


PROGRAMS = {
    "sum": lambda u: u.sum(0),
    "mean of squares": lambda u: (u * u).mean(0),
    "maximum": lambda u: jnp.maximum(u, 0.5 * u).max(0),
    "minimum": lambda u: u.min(0),
    "with weights and a mean": anomaly,
    "of integers": lambda u: u.astype(jnp.int32).sum(0),
    "values and their sum": lambda u: (u * 2, (u * 2).sum(0)),
    "two sums": lambda u: (u.sum(0), (u * u).sum(0)),
    "over two axes": lambda u: u.reshape(10, 4, 256, 128).mean((0, 1)),
    "months": months,
    "months, and rows between them": lambda u: (months(u), u * 2, months(u, "max")),
    "a product, summed": lambda u: jnp.einsum("tij,tij->ij", u, u - 1),
}


def loops_in(jaxpr):
    names = [str(equation.primitive) for equation in jaxpr.eqns]
    inner = [loops_in(j) for equation in jaxpr.eqns for j in jaxprs_in(equation.params)]
    return (names.count("scan") + names.count("while")) + sum(inner)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_over_rows_are_what_they_were(name):
    fun = PROGRAMS[name]
    want = jax.jit(fun)(FIELD)
    assert_same(plan(fun, FIELD, in_slices=({0: 3},)).run(FIELD), want, tolerance=1e-4)
    assert_same(sm.chunked(fun, {0: 3})(FIELD), want, tolerance=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [2, 7, 8, 9, 63, 64, 65, 300])
def test_any_number_of_rows_is_summed_as_accurately(length, monkeypatch):
    monkeypatch.setattr(cpu_reductions, "LONG_ROW", 1)
    rows = np.random.default_rng(1).random((length, 256), np.float32)
    exact = rows.astype(np.float64).sum(0)
    found = plan(lambda x: x.sum(0), rows, in_slices={1: 2}).run(rows)
    error = np.abs(np.asarray(found) - exact).max()
    naive = np.abs(np.add.accumulate(rows, 0)[-1] - exact).max()
    assert error <= max(naive, 2e-7 * exact.max())


def shard_of(fun, u):
    made = plan(fun, u, in_slices=({0: 2},))
    shard = made.shards[0]
    return jax.make_jaxpr(shard.function)(*shard.args(u)).jaxpr.eqns[0].params["jaxpr"]


def test_what_is_summed_is_never_there_as_a_whole():
    jaxpr = shard_of(anomaly, FIELD)
    shapes = [v.aval.shape for equation in jaxpr.eqns for v in equation.outvars]
    assert loops_in(jaxpr)
    assert (20, 256, 128) not in shapes


@pytest.mark.parametrize("is_slow", [False, True])
def test_scattered_rows_are_never_there_as_a_whole(is_slow, monkeypatch):
    monkeypatch.setattr(cpu_reductions, "SLOW_LEADING_SUMS", is_slow)
    jaxpr = shard_of(months, FIELD)
    shapes = [v.aval.shape for equation in jaxpr.eqns for v in equation.outvars]
    assert loops_in(jaxpr)
    assert (20, 256, 128) not in shapes
    assert not loops_in(shard_of(lambda u: months(u[..., 0]), FIELD))


def test_sums_of_products_and_over_several_axes_run_over_rows():
    assert loops_in(shard_of(lambda u: jnp.einsum("tij,tij->ij", u, u), FIELD))
    assert loops_in(shard_of(lambda u: u.reshape(-1, 2, 256, 128).sum((0, 1)), FIELD))
    # Rows of the result are short, though not what the first axis has.
    assert not loops_in(shard_of(lambda u: u.max((0, 1)), FIELD))


def test_short_rows_and_costly_steps_stay_as_they_are():
    assert loops_in(shard_of(lambda u: u.sum(0), FIELD[:, :8])) == 0
    jaxpr = shard_of(lambda u: (u @ u[0].T).sum(0), np.ones((8, 256, 8), np.float32))
    dots = [e for e in jaxpr.eqns if str(e.primitive) == "dot_general"]
    assert len(dots) == 1


def test_where_the_compiler_is_not_slow_it_sums(monkeypatch):
    monkeypatch.setattr(cpu_reductions, "SLOW_LEADING_SUMS", False)
    assert loops_in(shard_of(lambda u: u.sum(0), FIELD)) == 0


@examples(6)
@given(st.integers(0, 10**6))
def test_random_programs_over_rows(seed):
    fun, args, in_slices = random_program(seed)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(cpu_reductions, "SLOW_LEADING_SUMS", True)
        patch.setattr(cpu_reductions, "LONG_ROW", 1)
        patch.setattr(cpu_reductions, "BLOCK", 2)
        patch.setattr(cpu_reductions, "SCATTERED_ROW", 1)
        made = plan(fun, *args, in_slices=in_slices)
        if made.num_shards <= 100:
            assert_same(made.run(*args), jax.jit(fun)(*args), tolerance=2e-3)


def test_steps_on_single_numbers_are_no_sums():
    def scaled(u):
        return (u / jnp.sqrt(u.sum())).sum(0)

    want = jax.jit(scaled)(abs(FIELD))
    made = plan(scaled, abs(FIELD), in_slices=({0: 3},))
    assert_same(made.run(abs(FIELD)), want, tolerance=1e-4)


STENCILS = {
    "difference": (lambda x: jnp.abs(x[1:] - x[:-1]).max(0), True),
    "moved": (lambda x: (x[1:] - x[:-1])[:, None].sum((0, 1)), True),
    "half precision": (lambda x: (x[1:] + x[:-1]).astype(jnp.bfloat16).sum(0), True),
    "filtered": (
        lambda x: jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3)))(x).min(1),
        True,
    ),
    "one slice": (lambda x: (x[1:] * x[1:]).sum(0), False),
    "integers": (lambda x: (x.astype(int)[1:] - x.astype(int)[:-1]).sum(0), False),
    "of each": (lambda x: x[1:].sum(0) + x[:-1].sum(0), False),
}


@pytest.mark.parametrize("name", STENCILS)
def test_several_slices_are_not_fused_with_their_reduction(name):
    """XLA for CPU would store each of them."""
    fun, is_apart = STENCILS[name]
    x = np.random.default_rng(0).standard_normal((24, 8), np.float32)
    cut = jax.jit(sm.chunked(fun, {1: 2}))
    want = jax.jit(fun)(x)
    assert_same(cut(x), want, tolerance=1e-2 if name == "half precision" else 1e-5)
    assert_same(plan(fun, x, in_slices={1: 2}).run(x), cut(x))
    assert ("stablehlo.reduce_precision" in cut.lower(x).as_text()) == is_apart
