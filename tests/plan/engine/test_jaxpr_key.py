"""Jaxprs that compute the same are told from those that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.planning.engine.jaxpr_key import jaxpr_key
from shardmap.planning.lax.passes import function_of

X = jax.ShapeDtypeStruct((6, 3), np.float32)
TABLE = np.arange(18, dtype=np.float32).reshape(6, 3)


def of(function, *args):
    return jaxpr_key(jax.make_jaxpr(function)(*(args or (X,))))


def scanned(factor):
    def body(carry, row):
        return carry + row * factor, jnp.tanh(carry)

    return lambda x: lax.scan(body, x[0], x)


def test_the_same_traced_twice_is_alike():
    for make in (
        lambda: lambda x: jnp.tanh(x).sum(0) @ jnp.ones((3, 2)),
        lambda: scanned(2.0),
        lambda: lambda x: x + TABLE.copy(),
        lambda: lambda x: jax.random.normal(jax.random.key(3), x.shape) * x,
    ):
        assert of(make()) == of(make())
        assert hash(of(make())) == hash(of(make()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x + TABLE, lambda x: x + 2 * TABLE),
        (lambda x: (x - 1, x), lambda x: (x, x - 1)),
        (lambda x: x - x.sum(), lambda x: x.sum() - x),
        (scanned(2.0), scanned(3.0)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.astype(int), lambda x: x.astype("int16")),
        (
            lambda x: jax.pure_callback(lambda x: x + 1, X, x),
            lambda x: jax.pure_callback(lambda x: x + 2, X, x),
        ),
    ],
)
def test_what_differs_is_not_alike(one, other):
    assert of(one) != of(other)


def test_how_an_equation_runs_counts():
    def told(partitionable):
        with jax.threefry_partitionable(partitionable):
            return of(lambda x: x * 2)

    assert told(True) == told(True)
    assert told(False) == told(False)
    assert told(True) != told(False)


def test_types_and_shapes_count():
    def double(x):
        return x * 2

    assert of(double) != of(double, jax.ShapeDtypeStruct((6, 3), np.float16))
    assert of(double) != of(double, jax.ShapeDtypeStruct((6, 4), np.float32))


def test_what_inner_functions_close_over_is_one_constant():
    array = jnp.arange(6.0)
    twice = jax.checkpoint(lambda x: x * array * array)

    def fun(x):
        return twice(x) + sm.spmap(lambda x: x + array[0])(x) + twice(x + 1) * array

    graph = function_of(jax.make_jaxpr(fun)(jnp.ones(6))).graph
    assert len(graph.constants) == 1


def test_only_a_memory_map_is_not_copied(tmp_path):
    """What is written to another array later is no part of the plan."""
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=6)
    for array, is_shared in [(mapped, True), (np.ones(6, np.float32), False)]:
        graph = function_of(jax.make_jaxpr(lambda x, a=array: x + a)(jnp.ones(6))).graph
        [constant] = graph.constants.values()
        assert np.shares_memory(constant, array) == is_shared


def test_large_constants_are_alike_only_if_they_are_one():
    large = np.ones(2**18 + 1, np.float32)
    x = jax.ShapeDtypeStruct(large.shape, np.float32)
    held = jnp.asarray(large)
    assert of(lambda x: x + held, x) == of(lambda x: x + held, x)
    assert of(lambda x: x + held, x) != of(lambda x: x + jnp.asarray(large * 1), x)
