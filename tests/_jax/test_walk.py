"""Walks find what is in a jaxpr, each shared jaxpr once, and know what is around."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import add_p, mul_p

from shardmap._jax.walk import (
    constants_of,
    equations_for,
    inline_calls,
    jaxprs,
    jaxprs_in,
    opened,
    rewrite_jaxpr,
    with_same_constants,
)

X = np.ones(3, np.float32)


@jax.jit
def shared(x):
    return lax.sin(x)


def program(x):
    y = shared(shared(x))
    return lax.cond(y.sum() > 0, lambda v: lax.cos(v), lambda v: lax.tan(v), y)


def names(found):
    return [equation.primitive.name for equation in found]


def test_a_jaxpr_is_opened_and_its_constants_stay():
    closed = jax.make_jaxpr(lambda x: x + X)(X)
    jaxpr = opened(closed)
    assert opened(jaxpr) is jaxpr
    assert isinstance(jaxpr, jex_core.Jaxpr)
    assert len(constants_of(closed)) == len(jaxpr.constvars) == 1
    constvars = [jex_core.Var(var.aval) for var in jaxpr.constvars]
    changed = with_same_constants(jaxpr, constvars=constvars)
    assert changed.constvars == constvars
    assert list(constants_of(changed)) == list(constants_of(jaxpr))


def test_jaxprs_come_from_the_outside_in_each_once():
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    found = list(jaxprs(jaxpr))
    assert found[0] is jaxpr
    assert len(found) == len({id(each) for each in found}) == 4
    [equation] = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert [id(each) for each in jaxprs_in(equation.params)] == [
        id(each) for each in found[-2:]
    ]


def add_to_mul(equation):
    return (
        equation.replace(primitive=mul_p) if equation.primitive is add_p else equation
    )


def run(jaxpr, *args):
    return jax.core.eval_jaxpr(jaxpr, (), *args)[0]


def test_a_shared_jaxpr_stays_one_and_what_is_not_changed_stays_itself():
    double = jax.jit(lambda v: v + v)
    jaxpr = jax.make_jaxpr(lambda x: double(double(x)))(X).jaxpr
    changed = rewrite_jaxpr(jaxpr, add_to_mul)
    one, other = (opened(e.params["jaxpr"]) for e in changed.eqns)
    assert one is other
    assert rewrite_jaxpr(jaxpr, lambda equation: equation) is jaxpr
    assert rewrite_jaxpr(jaxpr, add_to_mul, lambda equation: False) is jaxpr


def test_one_equation_becomes_several_or_none_with_their_effects():
    def twice(equation):
        if equation.primitive.name == "debug_callback":
            return []
        if equation.primitive is not add_p:
            return equation
        return equations_for(
            lambda x, y: (x + y) + y, equation.invars, equation.outvars, equation
        )

    def f(x):
        jax.debug.callback(lambda: None)
        return jax.jit(lambda x: x + x)(x)

    changed = rewrite_jaxpr(jax.make_jaxpr(f)(X).jaxpr, twice)
    assert not changed.effects
    np.testing.assert_array_equal(run(changed, X), X * 3)


def test_calls_are_written_in_line_with_their_constants():
    table = np.arange(3, dtype=np.float32)

    @jax.jit
    def twice(x):
        return jnp.sin(x), x, x + table

    def fun(x):
        one, same, two = twice(x)
        other, _, _ = twice(one + same)
        return jax.checkpoint(lambda v: twice(v)[0])(other) * two, same

    jaxpr = jax.make_jaxpr(fun)(X).jaxpr
    plain = inline_calls(jaxpr)
    assert not {"jit", "checkpoint"} & {e.primitive.name for e in plain.eqns}
    results = jax.core.eval_jaxpr(plain, (), X)
    np.testing.assert_allclose(results, fun(X), rtol=1e-6)
    some = inline_calls(jaxpr, lambda equation: "policy" in equation.params)
    assert names(some.eqns) == ["jit", "add", "jit", "jit", "mul"]
