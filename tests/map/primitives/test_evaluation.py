"""Jaxprs evaluated equation by equation, some by a rule."""

import jax
import numpy as np
from jax import lax

from shardmap.map.primitives.evaluation import evaluate

X = np.arange(3, dtype=np.float32)


def evaluated(fun, rule=lambda equation, operands: None):
    return evaluate(jax.make_jaxpr(fun)(X), [X], rule)


def test_without_a_rule_it_is_what_the_function_gives():
    table = np.ones(3, np.float32)

    def fun(x):
        pair = jax.jit(lambda x: (x + table, x * 2))(x)
        return lax.cond(x.sum() > 0, lambda p: p, lambda p: p[::-1], pair)

    for found, expected in zip(evaluated(fun), fun(X), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_rule_is_asked_inside_of_calls_and_not_of_branches():
    asked = []

    def rule(equation, operands):
        asked.append(equation.primitive.name)
        return [-operands[0]] if equation.primitive is lax.sin_p else None

    def fun(x):
        x = jax.checkpoint(jax.jit(lambda x: lax.sin(x)))(x)
        return lax.cond(x[0] > 0, lax.cos, lax.cos, x)

    (found,) = evaluated(fun, rule)
    np.testing.assert_allclose(found, np.cos(-X), rtol=1e-6)
    assert "sin" in asked
    assert "cos" not in asked
