"""Kinds of arguments, each with a `jax.jit` that never raised at them."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.arrays.programs import running
from shardmap.arrays.programs.jits import MOST_KINDS, MOST_TIMES, Jits


@contextlib.contextmanager
def slow_calls():
    """How often JAX runs a jitted function by the slow way, in Python."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name))
    try:
        yield lambda: names.count("cache_miss")
    finally:
        sys.setprofile(None)


def test_collectives_run_by_the_fast_way_of_jax():
    mapped = sm.spmap(lambda x: x / jax.lax.psum(x, "i"), "i")
    x = mapped(np.arange(1.0, 9.0, dtype=np.float32))
    mapped(x)
    mapped(x)
    with slow_calls() as count:
        mapped(x)
        assert count() == 0
        jax.jit(lambda x: x + 1)(x)
        assert count() > 0


@pytest.mark.parametrize("kinds", [2, 5])
def test_each_kind_of_arguments_does(kinds):
    program = running.map_jit(lambda x: x * 2, jax.devices(), communicates=True)
    arguments = [jnp.ones(k + 1) for k in range(kinds)]
    for _ in range(3):
        results = [program(x) for x in arguments]
    with slow_calls() as count:
        for x in arguments:
            program(x)
    assert count() == 0
    for x, result in zip(arguments, results, strict=True):
        np.testing.assert_array_equal(result, 2 * np.ones_like(x))


def test_each_configuration_of_jax_has_its_own():
    traces = []

    def doubled(x):
        traces.append(jax.config.jax_default_matmul_precision)
        return x * 2

    program = running.map_jit(doubled, jax.devices(), communicates=True)
    x = jnp.ones(3)
    for precision in ["float32", "bfloat16"] * 3:
        with jax.default_matmul_precision(precision):
            program(x)
    assert traces == ["float32", "bfloat16"]


@pytest.mark.deep
def test_a_program_that_jax_has_forgotten_is_compiled_again():
    program = running.map_jit(lambda x: x * 2, jax.devices(), communicates=True)
    for _ in range(MOST_TIMES + 3):
        assert program(np.float32(3)) == 6
        jax.clear_caches()


def made():
    numbers = iter(range(1000))
    return Jits(lambda: next(numbers))


def test_one_kind_is_not_looked_up_and_several_are():
    jits = made()
    assert jits.of((1.0,), {}) is None
    assert jits.new((1.0,), {}) == 0
    assert jits.of(("anything",), {}) == 0
    assert jits.new((np.ones(2),), {"k": 1}) == 1
    assert jits.of((1.0,), {}) == 0
    assert jits.of((np.zeros(2),), {"k": 2}) == 1
    assert jits.of((np.zeros(3),), {"k": 2}) is None


def test_there_is_a_bound():
    jits = made()
    for size in range(2 * MOST_KINDS):
        jits.new((np.ones(size),), {})
    assert jits.of((np.ones(MOST_KINDS - 1),), {}) == MOST_KINDS - 1
    assert jits.of((np.ones(MOST_KINDS),), {}) is None
    found = [jits.new((np.ones(1),), {}) for _ in range(2 * MOST_TIMES)]
    assert len(set(found)) == MOST_TIMES - 1 + (found[-1] not in found[:-1])


def test_what_is_no_argument_is_left_to_jax():
    program = running.map_jit(lambda x: x, jax.devices(), communicates=True)
    with pytest.raises(
        TypeError, match=r"Error interpreting argument to .* abstract array"
    ):
        program("text")
