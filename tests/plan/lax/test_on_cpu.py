"""What shards compute in another way on CPU: as accurate, and without copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.lax import on_cpu
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same

FIELD = np.random.default_rng(0).standard_normal((19, 8, 64), np.float32)
MEAN = FIELD.mean(0)


@pytest.fixture
def slow(monkeypatch):
    """As if the compiler were slow at any rows, whatever it is."""
    monkeypatch.setattr(on_cpu, "SLOW_LEADING_SUMS", True)
    monkeypatch.setattr(on_cpu, "LONG_ROW", 1)


def anomaly(u):
    weights = jnp.arange(u.shape[0], dtype=u.dtype) + 1
    return (weights[:, None, None] * (u - MEAN[None]) ** 2).sum(0)


PROGRAMS = {
    "maximum": lambda u: jnp.maximum(u, 0.5 * u).max(0),
    "minimum": lambda u: u.min(0),
    "with weights and a mean": anomaly,
    "of integers": lambda u: u.astype(jnp.int32).sum(0),
    "values and their sum": lambda u: (u * 2, (u * 2).sum(0)),
    "over two axes": lambda u: u.mean((0, 1)),
    "over other axes": lambda u: u.sum((0, 2)) + u.sum(1).sum(1)[:8],
    "of no rows": lambda u: u[:0].sum(0),
    "products": lambda u: jnp.einsum("tij,tij->ij", u, u - 1),
    "short floats": lambda u: u.astype(jnp.bfloat16).sum(0).astype(jnp.float32),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_over_rows_are_what_they_were(name, slow):
    fun = PROGRAMS[name]
    tolerance = 2e-2 if name == "short floats" else 1e-4
    want = jax.jit(fun)(FIELD)
    assert_same(plan(fun, FIELD, in_slices=({0: 3},)).run(FIELD), want, tolerance)
    assert_same(jax.jit(sm.chunked(fun, {2: 2}))(FIELD), want, tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [2, 7, 9, 64, 300])
def test_any_number_of_rows_is_summed_as_accurately(length, slow):
    rows = np.random.default_rng(1).random((length, 256), np.float32)
    exact = rows.astype(np.float64).sum(0)
    found = plan(lambda x: x.sum(0), rows, in_slices={1: 2}).run(rows)
    error = np.abs(np.asarray(found) - exact).max()
    naive = np.abs(np.add.accumulate(rows, 0)[-1] - exact).max()
    assert error <= max(naive, 2e-7 * exact.max())


def test_parts_of_rows_are_added_only_where_the_compiler_is_slow(monkeypatch):
    rows = jax.ShapeDtypeStruct((16, 2, 2**15), np.float32)
    for is_slow in (False, True):
        monkeypatch.setattr(on_cpu, "SLOW_LEADING_SUMS", is_slow)
        text = jax.jit(sm.chunked(lambda u: (u * u).sum(0), {1: 2})).lower(rows)
        assert ("stablehlo.slice" in text.as_text()) == is_slow


def test_convolutions_of_few_features_keep_their_layout():
    images = np.random.default_rng(2).random((4, 2, 16, 16), np.float32)
    kernels = np.random.default_rng(3).random((2, 2, 3, 3), np.float32)

    def fun(images, kernels):
        return jax.lax.conv(images, kernels, (1, 1), "SAME")

    cut = jax.jit(sm.chunked(fun, ({0: 2}, None)))
    assert_same(cut(images, kernels), fun(images, kernels), 1e-5)
    assert "[b, f, 0, 1]" in cut.lower(images, kernels).as_text()
