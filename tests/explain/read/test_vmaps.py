"""What is seen of vmaps, of which a jaxpr keeps only that they were there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm


def axes(fun, *shapes):
    """The axes, indented by depth, each with its kind."""
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    found = sm.explain(fun)(*args).axes
    return [f"{'  ' * axis.depth}{axis.kind}: {axis}" for axis in found]


def double(x):
    return x * 2


def total(x):
    return x.sum()


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


def test_names_of_vmaps():
    fun = jax.vmap(jax.vmap(lambda x: lax.psum(x, "k"), axis_name="k"))
    assert axes(fun, (4, 3, 2)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step",
        "  vmap: axis 'k' of 3 = 1 device x 3 vectorised x 1 step",
    ]


def test_an_operand_that_is_not_mapped():
    fun = jax.vmap(jnp.dot, in_axes=(0, None))
    assert axes(fun, (4, 3), (3, 3)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]


def test_the_size_of_a_vmap_in_the_middle_is_deduced():
    def fun(x):
        return jax.vmap(total)(x * 2) + 1

    assert axes(fun, (4, 3)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]
    (axis,) = sm.explain(fun)(np.ones((4, 3))).axes
    assert "deduced from the shapes" in axis.running


def test_values_that_are_the_same_for_all_elements_do_not_mislead():
    def fun(x, w):
        total = jax.vmap(lambda row, w: (row * jnp.sin(w)).sum(), in_axes=(0, None))
        return total(x * 2, w) + 1

    assert axes(fun, (4, 3), (3,)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]

    def ambiguous(x, w):
        return jax.vmap(lambda row, w: row * jnp.sin(w), in_axes=(0, None))(x * 2, w)

    assert axes(ambiguous, (4, 3), (3,)) == [
        "vmap: an axis of unknown size = 1 device x unknown vectorised x 1 step"
    ]


def test_a_size_that_cannot_be_told_is_left_open():
    def fun(x):
        return jax.vmap(jnp.sin)(x * 2)

    assert axes(fun, (4, 3)) == [
        "vmap: an axis of unknown size = 1 device x unknown vectorised x 1 step"
    ]
    assert axes(fun, (4, 4)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]


def test_vmaps_one_after_another():
    def fun(x, y):
        return jax.vmap(total)(x * 2) + 1, jax.vmap(total)(y * 2)

    assert axes(fun, (4, 3), (5, 2)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step",
        "vmap: an axis of 5 = 1 device x 5 vectorised x 1 step",
    ]


def test_vmaps_directly_one_after_another():
    def of_arguments(x, y):
        return jax.vmap(total)(x), jax.vmap(jnp.sin)(y)

    def in_the_middle(x, y):
        x, y = x * 2, y * 2
        return jax.vmap(total)(x), jax.vmap(total)(y)

    for fun, shape in ((of_arguments, (5, 4)), (in_the_middle, (5, 2))):
        assert axes(fun, (4, 3), shape) == [
            "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step",
            "vmap: an axis of 5 = 1 device x 5 vectorised x 1 step",
        ]


def test_a_vmap_after_one_of_the_arguments():
    def fun(x, y):
        y = y * 2
        return jax.vmap(total)(x), jax.vmap(total)(y)

    assert axes(fun, (4, 3), (5, 2)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step",
        "vmap: an axis of 5 = 1 device x 5 vectorised x 1 step",
    ]


def test_the_way_back_is_no_other_axis():
    def loss(x):
        return jax.vmap(lambda row: jnp.sin(row).sum())(x).sum()

    assert axes(jax.grad(loss), (4, 3)) == [
        "vmap: an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]

    def mapped_loss(x):
        return sm.spmap(lambda row: jnp.sin(row).sum(), "i")(x).sum()

    assert axes(jax.grad(mapped_loss), (8, 3)) == [
        "spmap: axis 'i' of 8 = 8 devices x 1 vectorised x 1 step"
    ]
