"""Loops in Python are seen in the program that they make."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explain.read.remarks.unrolled import Repetition, blocks

X = np.ones((200, 16), np.float32)


def in_python(a, b):
    return jnp.stack([jnp.tanh(p) @ q for p, q in zip(a, b, strict=True)])


def remarks(fun, *args):
    found = sm.explain(fun)(*args).remarks
    return [each for each in found if "a loop in Python" in each.text]


@pytest.mark.few(1)
@pytest.mark.parametrize("fun", [in_python, jax.jit(in_python)], ids=["bare", "jit"])
def test_a_loop_in_python_is_said(fun):
    (remark,) = remarks(fun, X, X)
    # How rows are taken is up to JAX.
    assert re.match(r"the same \d operations 200 times: a loop in Python", remark.text)
    assert "jax.vmap" in remark.advice
    assert "(in_python" in remark.source


def test_one_that_passes_something_on_is_said_too():
    def steps(x):
        for _ in range(50):
            x = jnp.sin(x) + 1
        return x

    (remark,) = remarks(steps, X)
    assert remark.text.startswith("the same 2 operations 50 times")
    assert "jax.lax.scan" in remark.advice


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_operations_in_what_a_round_calls_count(wrap):
    layer = wrap(lambda x: jnp.tanh(x) * 2 + 1)

    def steps(x):
        for _ in range(12):
            x = layer(x)
        return x

    (remark,) = remarks(steps, X)
    assert remark.text.startswith("the same 3 operations 12 times")
    assert "36 of the 36 operations" in remark.text


@pytest.mark.deep
def test_a_small_part_of_a_program_is_left_alone():
    def fun(x, leaves):
        # No two of these are of the same shape.
        rest = [jnp.sin(x[: k + 1, :3]) * k for k in range(190)]
        return rest, [leaf * 2 for leaf in leaves]

    few, many = [np.ones(3, np.float32)] * 33, [np.ones(3, np.float32)] * 100
    assert remarks(fun, X, few) == []
    assert [r.text[:30] for r in remarks(fun, X, many)] == [
        "the same operation 100 times: "
    ]


def test_two_loops_have_a_line_each():
    def both(x):
        for _ in range(20):
            x = jnp.sin(x) + 1
        x = jnp.cos(x)
        for _ in range(30):
            x = jnp.tanh(x) * 2
        return x

    assert [each.text[:28] for each in remarks(both, X)] == [
        "the same 2 operations 30 tim",
        "the same 2 operations 20 tim",
    ]


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.vmap(jnp.tanh)(x),
        lambda x: lax.map(jnp.tanh, x),
        lambda x: jnp.tanh(jnp.sin(x) + 1) * 2,
        lambda x: x * x * x * x,
    ],
    ids=["vmap", "loop", "none", "few"],
)
def test_what_is_no_loop_in_python_is_not(fun):
    assert remarks(fun, X) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("abcd" * 10, [Repetition(0, 4, 10)]),
        ("a" * 40, [Repetition(0, 1, 40)]),
        ("x" + "ab" * 20 + "y", [Repetition(1, 2, 20)]),
        ("ab" * 30 + "cde" * 20, [Repetition(0, 2, 30), Repetition(60, 3, 20)]),
        ("abcd" * 7, []),
        ("abc" * 10, []),
        ("", []),
    ],
)
def test_the_repeated_blocks_of_a_text(text, found):
    assert sorted(blocks(text)) == found
