"""Every kind of map body under every transformation of JAX, against `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.map_programs import BODIES, Body, assert_laid_out, assert_same, spread

ALL = list(BODIES)
SMOOTH = [name for name, body in BODIES.items() if body.smooth]


def scalar(tree: Any) -> Any:
    """A loss in which every entry of every floating leaf counts differently."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            weights = jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype))
            total += (jnp.sin(leaf).ravel() * weights).sum()
    return total


def loss_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar loss, with the integer results beside it."""

    def loss(*args: Any) -> Any:
        results = fun(*args)
        return scalar(results), jax.tree.map(jnp.round, results)

    return loss


def directions(args: Any) -> Any:
    return jax.tree.map(lambda a: spread(a.shape, 3.0), tuple(args))


def floating(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Without the integer results, for the Jacobians."""

    def only(*args: Any) -> Any:
        leaves = jax.tree.leaves(fun(*args))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]

    return only


# Around the map


def plain(fun, x, w):
    return fun(x, w)


def value_and_grad(fun, x, w):
    return jax.value_and_grad(loss_of(fun), (0, 1), has_aux=True)(x, w)


def grad_of_unmapped(fun, x, w):
    return jax.grad(lambda w: loss_of(fun)(x, w)[0])(w)


def jvp(fun, x, w):
    return jax.jvp(floating(fun), (x, w), directions((x, w)))


def linearize(fun, x, w):
    values, linear = jax.linearize(floating(fun), x, w)
    return values, linear(*directions((x, w))), linear(*directions((w * 0 + x, w)))


def vjp(fun, x, w):
    values, pullback = jax.vjp(floating(fun), x, w)
    return values, pullback(jax.tree.map(jnp.cos, values))


def jacfwd(fun, x, w):
    return jax.jacfwd(floating(fun), 1)(x, w)


def jacrev(fun, x, w):
    return jax.jacrev(floating(fun), 1)(x, w)


def hessian(fun, x, w):
    return jax.hessian(lambda w: scalar(fun(x, w)))(w)


def vmap(fun, x, w):
    batch = jnp.stack([x, x + 1, x * 2], axis=1)
    return jax.vmap(fun, in_axes=(1, None), out_axes=-1, axis_name="v")(batch, w)


def vmap_unmapped(fun, x, w):
    return jax.vmap(fun, in_axes=(None, 0))(x, jnp.stack([w, w + 1]))


def vmap_of_grad(fun, x, w):
    batch = (jnp.stack([x, x + 1], axis=-1), jnp.stack([w, w * 2]))
    gradient = jax.grad(lambda x, w: scalar(fun(x, w)), (0, 1))
    return jax.vmap(gradient, in_axes=(-1, 0))(*batch)


def grad_of_vmap(fun, x, w):
    batch = jnp.stack([x, x + 1], axis=2)
    batched = jax.vmap(fun, in_axes=(2, None), out_axes=0)
    return jax.grad(lambda x, w: scalar(batched(x, w)), (0, 1))(batch, w)


def scan(fun, x, w):
    def step(carry, scale):
        loss, gradient = jax.value_and_grad(lambda w: scalar(fun(x * scale, w)))(carry)
        return carry - 0.1 * gradient, loss

    return lax.scan(step, jnp.asarray(w), jnp.array([1.0, 0.5, 2.0]))


def grad_of_scan(fun, x, w):
    def loss(x, w):
        def step(carry, scale):
            value = scalar(fun(x * scale, w * jnp.cos(carry)))
            return carry + value, value

        return scalar(lax.scan(step, 0.0, jnp.array([1.0, 0.5]))[1])

    return jax.grad(loss, (0, 1))(x, w)


def while_loop(fun, x, w):
    def body(state):
        step, total = state
        return step + 1, total + scalar(fun(x * step, w))

    return lax.while_loop(lambda state: state[0] < jnp.round(x.size**0), body, (0, 0.0))


def cond(fun, x, w):
    def loss(x, w):
        return lax.cond(
            x.sum() < 1e6, lambda: scalar(fun(x, w)), lambda: scalar(fun(x * 2, w))
        )

    return jax.grad(loss, (0, 1))(x, w)


def checkpoint(fun, x, w):
    return value_and_grad(jax.checkpoint(fun), x, w)


def checkpoint_policy(fun, x, w):
    policy = jax.checkpoint_policies.everything_saveable
    return value_and_grad(jax.checkpoint(fun, policy=policy), x, w)


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


ANY = [plain, vmap, vmap_unmapped, while_loop]
DIFFERENTIABLE = [
    value_and_grad,
    grad_of_unmapped,
    jvp,
    linearize,
    vjp,
    jacfwd,
    jacrev,
    hessian,
    vmap_of_grad,
    grad_of_vmap,
    scan,
    grad_of_scan,
    cond,
    checkpoint,
    checkpoint_policy,
    custom_jvp,
    custom_vjp,
]


@pytest.mark.parametrize("name", ALL)
def test_eager(name):
    body = BODIES[name]
    results = body.mapped()(*body.args())
    assert_same(results, body.expected()(*body.args()))
    assert_laid_out(results, body.out_axes, body.size)


def check(transformation: Callable[..., Any], body: Body) -> None:
    args = body.args()
    actual = jax.jit(lambda *args: transformation(body.mapped(), *args))(*args)
    expected = jax.jit(lambda *args: transformation(body.expected(), *args))(*args)
    assert_same(actual, expected, 2e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("transformation", ANY)
def test_transformation(transformation, name):
    check(transformation, BODIES[name])


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("transformation", DIFFERENTIABLE)
def test_derivative(transformation, name):
    check(transformation, BODIES[name])
