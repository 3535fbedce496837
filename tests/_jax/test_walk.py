"""Rewrites reach what a jaxpr holds, each shared jaxpr once."""

import jax
import numpy as np
from jax import lax
from jax.extend.core.primitives import add_p, mul_p

from shardmap._jax.walk import as_open_jaxpr, rewrite_jaxpr

X = np.ones(3, np.float32)


@jax.jit
def shared(x):
    return lax.sin(x)


def program(x):
    y = shared(shared(x))
    return lax.cond(y.sum() > 0, lambda v: lax.cos(v), lambda v: lax.tan(v), y)


def add_to_mul(equation):
    return (
        equation.replace(primitive=mul_p) if equation.primitive is add_p else equation
    )


def test_a_shared_jaxpr_stays_one_and_what_is_not_changed_stays_itself():
    double = jax.jit(lambda v: v + v)
    jaxpr = jax.make_jaxpr(lambda x: double(double(x)))(X).jaxpr
    changed = rewrite_jaxpr(jaxpr, add_to_mul)
    one, other = (as_open_jaxpr(e.params["jaxpr"]) for e in changed.eqns)
    assert one is other
    assert rewrite_jaxpr(jaxpr, lambda equation: equation) is jaxpr
    assert rewrite_jaxpr(jaxpr, add_to_mul, lambda equation: False) is jaxpr
