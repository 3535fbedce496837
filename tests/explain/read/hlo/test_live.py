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
    assert 1 <= len(report.largest) <= 4


def test_a_value_is_done_with_after_the_last_that_takes_it():
    """So that of a chain of products two are alive at once."""

    def fun(x):
        return x @ x @ x @ x @ x

    report = sm.explain(fun)(np.ones((64, 64), np.float32))
    assert [each.bytes for each in report.largest] == [64 * 64 * 4] * 2
