"""Every kind of map body under every transformation of JAX, against `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.map_programs import (
    BODIES,
    MAPS,
    Body,
    assert_laid_out,
    assert_same,
    both_lowerings,
    spread,
)


def scalar(tree: Any) -> Any:
    """A loss in which every entry of every floating leaf counts differently."""
    total = jnp.zeros(())
    for leaf in floats(tree):
        weights = jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype))
        total += (jnp.sin(leaf).ravel() * weights).sum()
    return total


def floats(tree: Any) -> list[Any]:
    """The leaves that have a derivative."""
    leaves = jax.tree.leaves(tree)
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def floating(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its integer results."""
    return lambda *args: floats(fun(*args))


def directions(*args: Any) -> Any:
    """Tangents."""
    return jax.tree.map(lambda a: spread(a.shape, 3.0), args)


def check(
    transformation: Callable[..., Any],
    body: Body,
) -> None:
    """The transformed map gives the same by both lowerings as `jax.vmap`, under jit.

    Args:
      transformation: is called with the mapped function and its arguments.
      body: what is mapped.
    """

    def actual(*args: Any) -> list[Any]:
        return [transformation(body.mapped(spmap), *args) for spmap in MAPS]

    def expected(*args: Any) -> Any:
        return transformation(body.expected(), *args)

    # Compiling is most of the work, and how well is not what is tested.
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    args = body.args()
    by_lowering, want = (
        jax.jit(fun, compiler_options=options)(*args) for fun in (actual, expected)
    )
    for got in by_lowering:
        assert_same(got, want, 3e-5)


# Transformations of the mapped function: each is called with it, x and w.


def plain(fun, x, w):
    return fun(x, w)


def value_and_grad(fun, x, w):
    def loss(x, w):
        results = fun(x, w)
        return scalar(results), jax.tree.map(jnp.round, results)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)


def jvp_of_one(fun, x, w):
    return jax.jvp(lambda w: floating(fun)(x, w), (w,), directions(w))


def linearize_and_transpose(fun, x, w):
    values, linear = jax.linearize(floating(fun), x, w)
    tangents = linear(*directions(x, w))
    transposed = jax.linear_transpose(linear, x, w)
    return values, tangents, transposed(jax.tree.map(jnp.cos, values))


def vjp(fun, x, w):
    values, pullback, aux = jax.vjp(
        lambda x, w: (floating(fun)(x, w), x), x, w, has_aux=True
    )
    return pullback(jax.tree.map(jnp.cos, values)), aux


def jacobians(fun, x, w):
    return jax.jacfwd(floating(fun), 1)(x, w), jax.jacrev(floating(fun), 1)(x, w)


def hessian(fun, x, w):
    return jax.hessian(lambda w: scalar(fun(x, w)))(w)


def vmap(fun, x, w):
    batch = jnp.stack([x, x * 0.5, -x], axis=1)
    return (
        jax.vmap(fun, in_axes=(1, None), out_axes=-1, axis_name="v")(batch, w),
        jax.vmap(fun, in_axes=(None, 0))(x, jnp.stack([w, -w])),
    )


def vmap_of_grad(fun, x, w):
    batch = jnp.stack([x, -x], axis=-1), jnp.stack([w, w * 2])
    gradient = jax.grad(lambda x, w: scalar(fun(x, w)), (0, 1))
    return jax.vmap(gradient, in_axes=(-1, 0))(*batch)


def grad_of_vmap(fun, x, w):
    batched = jax.vmap(fun, in_axes=(2, None), axis_name="v")
    loss = jax.grad(lambda x, w: scalar(batched(x, w)), (0, 1))
    return loss(jnp.stack([x, -x], axis=2), w)


def scan(fun, x, w):
    def step(w, scale):
        loss, gradient = jax.value_and_grad(lambda w: scalar(fun(x * scale, w)))(w)
        return w - 0.01 * gradient, loss

    return lax.scan(step, jnp.asarray(w), jnp.array([1.0, 0.5, -1.0]))


def grad_of_scan(fun, x, w):
    def loss(x, w):
        def step(carry, scale):
            value = scalar(fun(x * scale, w * jnp.cos(carry)))
            return jnp.sin(value), value

        return lax.scan(step, 0.0, jnp.array([1.0, 0.5]))[1].sum()

    return jax.grad(loss, (0, 1))(x, w)


def while_loop(fun, x, w):
    def body(state):
        step, total = state
        return step + 1, total + scalar(fun(x * step, w))

    return lax.while_loop(
        lambda state: state[0] < 2 + (x[0] < -2).sum(), body, (0, 0.0)
    )


def cond(fun, x, w):
    def loss(x, w):
        here, there = lambda: scalar(fun(x, w)), lambda: scalar(fun(x * 2, w))
        return lax.cond(x.sum() < 1e6, here, there)

    return jax.grad(loss, (0, 1))(x, w)


def checkpoint(fun, x, w):
    return value_and_grad(jax.checkpoint(fun), x, w)


def custom_jvp(fun, x, w):
    @jax.custom_jvp
    def twice_as_steep(x, w):
        return floating(fun)(x, w)

    @twice_as_steep.defjvp
    def rule(primals, tangents):
        values, tangents = jax.jvp(floating(fun), primals, tangents)
        return values, jax.tree.map(lambda t: 2 * t, tangents)

    return value_and_grad(twice_as_steep, x, w)


def custom_vjp(fun, x, w):
    @jax.custom_vjp
    def twice_as_steep(x, w):
        return floating(fun)(x, w)

    def backward(pullback, cotangents):
        return jax.tree.map(lambda t: 2 * t, pullback(cotangents))

    twice_as_steep.defvjp(lambda x, w: jax.vjp(floating(fun), x, w), backward)
    return value_and_grad(twice_as_steep, x, w)


TRANSFORMATIONS = [
    plain,
    vmap,
    value_and_grad,
    while_loop,
    jvp_of_one,
    linearize_and_transpose,
    vjp,
    jacobians,
    hessian,
    vmap_of_grad,
    grad_of_vmap,
    scan,
    grad_of_scan,
    cond,
    checkpoint,
    custom_jvp,
    custom_vjp,
]
DISCRETE = {plain, vmap, while_loop}
# One body of each kind goes through everything, its variants through these.
EVERY_BODY = {plain, vmap, value_and_grad}
EVERY_TRANSFORMATION = {
    "constant",
    "psum",
    "all_gather",
    "ppermute",
    "all_to_all_moved",
    "psum_scatter",
    "axis_index",
    "psum_groups",
    "nested_both",
    "nested_blocks",
}
# Of each row every seventh cell is a case, of those with all bodies every third.
CELLS = [
    pytest.param(transformation, name, id=f"{transformation.__name__}-{name}")
    for row, transformation in enumerate(TRANSFORMATIONS)
    for column, (name, body) in enumerate(BODIES.items())
    if (transformation in EVERY_BODY or name in EVERY_TRANSFORMATION)
    and (body.smooth or transformation in DISCRETE)
    and (row + column) % (3 if transformation in EVERY_BODY else 7) == 0
]


@pytest.mark.few(5)
@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("name", BODIES)
def test_eager(name, spmap):
    body = BODIES[name]
    results = body.mapped(spmap)(*body.args())
    expected = jax.jit(body.expected())(*body.args())
    assert_same(results, expected, weak_types=True)
    if 8 % body.size == 0:
        assert_laid_out(results, body.out_axes, body.size)


@pytest.mark.few(2)
@pytest.mark.parametrize(("transformation", "name"), CELLS)
def test_around_the_map(transformation, name):
    check(transformation, BODIES[name])
