"""Functions written where they are called."""

import jax
import jax.numpy as jnp
import numpy as np

from shardmap.map.collectives.inline_calls import inline_calls

X = np.arange(3, dtype=np.float32)


@jax.jit
def twice(x):
    return jnp.sin(x), x, np.float32(2)


def fun(x):
    one, same, two = twice(x)
    other, _, _ = twice(one + same)
    return jax.checkpoint(lambda v: twice(v)[0])(other) * two, same


def names(jaxpr):
    return [equation.primitive.name for equation in jaxpr.eqns]


def test_all_calls_in_line_give_the_same():
    jaxpr = jax.make_jaxpr(fun)(X).jaxpr
    plain = inline_calls(jaxpr, lambda equation: True)
    assert names(plain) == ["sin", "add", "sin", "sin", "mul"]
    results = jax.core.eval_jaxpr(plain, (), X)
    np.testing.assert_array_equal(results, fun(X))


def test_only_calls_that_are_wanted():
    jaxpr = jax.make_jaxpr(fun)(X).jaxpr
    assert names(inline_calls(jaxpr, lambda equation: False)) == names(jaxpr)
    some = inline_calls(jaxpr, lambda equation: "policy" in equation.params)
    assert "sin" not in names(some)
    assert names(some) == ["jit", "add", "jit", "jit", "mul"]
    np.testing.assert_array_equal(jax.core.eval_jaxpr(some, (), X), fun(X))
