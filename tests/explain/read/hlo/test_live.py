"""The largest values alive at the peak are those that the program makes so large."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm


def test_a_matrix_in_the_middle_has_its_line():
    def attention(q, k, v):
        scores = jnp.sin(q @ k.T)  # Large.
        return jnp.cos(scores @ v)

    x = np.ones((256, 4), np.float32)
    report = sm.explain(attention)(x, x, x)
    largest = report.largest[0]
    assert (largest.type, largest.bytes) == ("f32[256,256]", 256 * 256 * 4)
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    number = int(largest.source.split(" ")[0].rpartition(":")[2])
    assert lines[number - 1].endswith("# Large.")
    assert largest.source in " ".join(str(report).split())
    assert "256,256" in report._repr_html_()


def test_what_a_loop_holds_counts():
    def step(x, _):
        return jnp.cos(jnp.outer(x, x)) @ x, None

    def fun(x):
        return lax.scan(step, x, length=3)[0]

    report = sm.explain(fun)(np.ones(128, np.float32))
    assert report.largest[0].bytes == 128 * 128 * 4


def test_a_value_that_is_done_with_is_not_there():
    """Of ten matrices, one after the other, at most a few are alive at once."""

    def fun(x):
        for _ in range(10):
            x = jnp.sort(jnp.sin(x) @ x, 0)
        return x

    report = sm.explain(jax.jit(fun))(np.ones((64, 64), np.float32))
    matrices = [each for each in report.largest if each.bytes == 64 * 64 * 4]
    assert 1 <= len(matrices) <= 4


def test_a_value_is_done_with_after_the_last_that_takes_it():
    """So that of a chain of products two are alive at once, and the result has room."""

    def fun(x):
        return x @ x @ x @ x @ x

    report = sm.explain(fun)(np.ones((64, 64), np.float32))
    assert [each.bytes for each in report.largest] == [64 * 64 * 4] * 3


def held(fun, *args):
    """What is listed, of a total that is no more than the peak."""
    report = sm.explain(fun)(*args)
    assert sum(each.bytes for each in report.largest) <= report.peak_bytes
    return report.largest


def test_the_results_of_all_steps_are_of_the_line_that_makes_one():
    def fun(x, ws):
        def step(x, w):
            return (jnp.sin(x @ w),) * 2  # Kept.

        return (lax.scan(step, x, ws)[1] ** 2).mean()

    x, ws = np.ones((64, 64), np.float32), np.ones((12, 64, 64), np.float32)
    largest = held(jax.grad(fun, (0, 1)), x, ws)
    assert [each.type for each in largest[:2]] == ["f32[12,64,64]"] * 2
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    numbers = [
        int(each.source.split(" ")[0].rpartition(":")[2]) for each in largest[:2]
    ]
    assert any(lines[number - 1].endswith("# Kept.") for number in numbers)


def test_a_donated_argument_is_no_value_of_its_own():
    fun = jax.jit(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1))
    a = np.ones((64, 64), np.float32)
    assert not [each for each in held(fun, a, a) if each.bytes >= a.nbytes]
