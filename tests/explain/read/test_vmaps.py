"""What is seen of vmaps, of which a jaxpr keeps only that they were there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from tests.explain.read.test_visitor import axes, double, total


@pytest.mark.parametrize(
    "fun", [jax.vmap(double), jax.jit(jax.vmap(double)), jax.vmap(jax.jit(double))]
)
def test_vmap(fun):
    assert axes(fun, (4, 3)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]


@pytest.mark.parametrize(("in_axes", "size"), [(0, 4), (1, 5), (-1, 6)])
def test_the_size_of_a_vmap_is_not_guessed(in_axes, size):
    """The jaxpr is the same for all of them."""
    fun = jax.vmap(jnp.sin, in_axes=in_axes, out_axes=in_axes)
    assert axes(fun, (4, 5, 6)) == [
        f"vmap: an axis of {size} = 1 device x {size} vectorised x 1 step"
    ]


def test_of_vmaps_in_vmaps_and_over_other_values_nothing_is_known():
    assert axes(jax.vmap(jax.vmap(double)), (4, 3, 2)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]
    assert axes(lambda x: jax.vmap(total)(x * 2) + 1, (4, 3)) == []


def test_a_function_is_traced_at_most_twice():
    calls = []

    def fun(x):
        calls.append(x)
        return jax.vmap(jax.vmap(double))(x * 2)

    sm.explain(fun)(np.ones((4, 3), np.float32))
    assert len(calls) <= 2


def test_vmaps_one_after_another():
    def fun(x, y):
        return jax.vmap(total)(x), jax.vmap(jnp.sin)(y)

    assert axes(fun, (4, 3), (5, 4)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step",
        "vmap: an axis of 5 = 1 device x 5 vectorised x 1 step",
    ]


def test_the_way_back_is_no_other_axis():
    def loss(x):
        return jax.vmap(lambda row: jnp.sin(row).sum())(x).sum()

    assert axes(jax.grad(loss), (4, 3)) == []

    def mapped_loss(x):
        return sm.spmap(lambda row: jnp.sin(row).sum(), "i")(x).sum()

    assert axes(jax.grad(mapped_loss), (8, 3)) == [
        "spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step"
    ]


def test_a_function_that_looks_at_its_argument_is_explained_without_its_vmaps():
    def fun(x):
        if not isinstance(x, jax.Array):
            raise LookupError("an array")
        return jax.vmap(double)(x)

    assert axes(fun, (4, 3)) == []
