"""Walks find what is in a jaxpr, each shared jaxpr once, and know what is around."""

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax

from shardmap._jax.walk import (
    constants_of,
    equations,
    jaxprs,
    jaxprs_in,
    opened,
    walk,
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


def test_an_equation_comes_before_those_it_holds_and_each_jaxpr_once():
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    found = names(equations(jaxpr))
    assert found[:3] == ["jit", "sin", "jit"]
    assert found.count("sin") == 1
    assert found[-3] == "cond"
    assert set(found[-2:]) == {"cos", "tan"}


def test_closed_jaxprs_are_walked_as_open_ones():
    closed = jax.make_jaxpr(program)(X)
    assert names(equations(closed)) == names(equations(closed.jaxpr))


def test_what_is_not_entered_is_left_out_but_named_itself():
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    outside = names(equations(jaxpr, into=lambda e: e.primitive.name != "cond"))
    assert "cond" in outside
    assert "cos" not in outside
    assert "sin" in outside


def test_a_walk_knows_what_is_around():
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    around = {
        equation.primitive.name: state
        for equation, state in walk(jaxpr, (), lambda e, s: (*s, e.primitive.name))
    }
    assert around["cond"] == ()
    assert around["tan"] == ("cond",)


def test_a_shared_jaxpr_is_walked_once_for_each_state():
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    numbers = iter(range(10))
    states = [
        state
        for equation, state in walk(jaxpr, -1, lambda e, s: next(numbers))
        if equation.primitive.name == "sin"
    ]
    assert len(set(states)) == len(states) == 2


def test_jaxprs_come_from_the_outside_in_each_once():
    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    found = list(jaxprs(jaxpr))
    assert found[0] is jaxpr
    assert len(found) == len({id(each) for each in found}) == 4
    [equation] = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert [id(each) for each in jaxprs_in(equation.params)] == [
        id(each) for each in found[-2:]
    ]
