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


def test_vmap_says_what_it_is():
    (axis,) = sm.explain(jax.vmap(double))(np.ones((4, 3))).axes
    assert axis.running.startswith("one batched operation: no parallel processes")
    assert "spmap" in axis.change


@pytest.mark.parametrize(("in_axes", "size"), [(0, 4), (1, 5), (-1, 6)])
def test_the_size_of_a_vmap_is_not_guessed(in_axes, size):
    """The jaxpr is the same for all of them."""
    fun = jax.vmap(jnp.sin, in_axes=in_axes, out_axes=in_axes)
    assert axes(fun, (4, 5, 6)) == [
        f"vmap: an axis of {size} = 1 device x {size} vectorised x 1 step"
    ]


UNKNOWN = "an axis of unknown size = 1 device x unknown vectorised x 1 step"


def test_a_vmap_inside_another_is_of_unknown_size():
    fun = jax.vmap(jax.vmap(double))
    assert axes(fun, (4, 3, 2)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step",
        f"  vmap: {UNKNOWN}",
    ]


def test_a_vmap_says_which_arguments_it_is_over():
    fun = jax.vmap(lambda w, x: w @ x, in_axes=(None, 0))
    args = np.ones((3, 3), np.float32), np.ones((4, 3), np.float32)
    (axis,) = sm.explain(fun)(*args).axes
    assert axis.over == ("x",)


def test_a_function_is_traced_at_most_twice():
    calls = []

    def fun(x):
        calls.append(x)
        return jax.vmap(jax.vmap(double))(x * 2)

    sm.explain(fun)(np.ones((4, 3), np.float32))
    assert len(calls) <= 2


def test_a_vmap_over_other_values_is_of_unknown_size():
    def fun(x):
        return jax.vmap(total)(x * 2) + 1

    assert axes(fun, (4, 3)) == [f"vmap: {UNKNOWN}"]
    (axis,) = sm.explain(fun)(np.ones((4, 3))).axes
    assert "it is not over arguments" in axis.running


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

    assert axes(jax.grad(loss), (4, 3)) == [f"vmap: {UNKNOWN}"]

    def mapped_loss(x):
        return sm.spmap(lambda row: jnp.sin(row).sum(), "i")(x).sum()

    assert axes(jax.grad(mapped_loss), (8, 3)) == [
        "spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step"
    ]
