"""What nobody uses leaves a map, and what has an effect stays."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval

from tests.map_programs import (
    both_lowerings,
    spread,
)

X = spread((4, 3))


@both_lowerings
def test_dead_results_are_not_computed(spmap):
    devices = jax.devices()[:4]
    fun = spmap(lambda x, y: (x * 2, lax.psum(jnp.sin(y), "i")), "i", devices=devices)
    text = jax.jit(lambda x, y: fun(x, y)[0]).lower(X, X).compile().as_text()
    assert "all-reduce" not in text
    assert "sine" not in text


@both_lowerings
def test_dead_operands_and_results_leave_the_equation(spmap):
    fun = spmap(lambda x, y, w: (x * w, jnp.sin(y)), in_axes=(0, 1, None))
    jaxpr = jax.make_jaxpr(fun)(X, X.T, X[0]).jaxpr
    pruned, used = partial_eval.dce_jaxpr(jaxpr, [True, False])
    (equation,) = pruned.eqns
    assert list(used) == [True, False, True]
    assert equation.params["in_axes"] == (0, None)
    assert equation.params["out_axes"] == (0,)
    assert [e.primitive.name for e in equation.params["call_jaxpr"].eqns] == ["mul"]
    assert not partial_eval.dce_jaxpr(jaxpr, [False, False])[0].eqns


@both_lowerings
def test_an_equation_without_dead_code_stays_as_it_is(spmap):
    fun = spmap(lambda x: spmap(lambda x: lax.psum(jnp.sin(x), "i"))(x), "i")
    jaxpr = jax.make_jaxpr(fun)(X).jaxpr
    pruned, _ = partial_eval.dce_jaxpr(jaxpr, [True])
    assert pruned.eqns[0] is jaxpr.eqns[0]


@both_lowerings
def test_effects_are_not_dead(spmap):
    fun = spmap(lambda x: (jax.debug.print("{}", x), x * 2)[1])
    jaxpr = jax.make_jaxpr(fun)(X).jaxpr
    (equation,) = partial_eval.dce_jaxpr(jaxpr, [False])[0].eqns
    assert not equation.params["out_axes"]


@both_lowerings
def test_dead_code_of_a_gradient(spmap):
    # The backward map wants no residual of a branch that nobody differentiates.
    fun = spmap(lambda x: (jnp.sin(x), jnp.exp(jnp.cos(x))))
    gradient = jax.jit(jax.grad(lambda x: fun(x)[0].sum()))
    assert "exponential" not in gradient.lower(X).compile().as_text()
