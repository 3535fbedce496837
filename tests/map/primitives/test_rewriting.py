"""Equations are changed wherever they are, and effects and types follow."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import add_p, mul_p

import shardmap as sm
from shardmap._jax.effects import axes_used
from shardmap._jax.walk import equations
from shardmap.map.primitives.rewriting import rewrite_jaxpr

X = np.arange(4, dtype=np.float32)


def add_to_mul(equation, shadowed):
    return (
        equation.replace(primitive=mul_p) if equation.primitive is add_p else equation
    )


def traced(fun, *args, **axes):
    return jax.make_jaxpr(fun, axis_env=list(axes.items()))(*args).jaxpr


def run(jaxpr, *args):
    return jax.core.eval_jaxpr(jaxpr, (), *args)[0]


def test_what_control_flow_and_calls_hold_is_changed():
    def f(x):
        y = jax.jit(lambda v: v + v)(x)
        return lax.fori_loop(0, 2, lambda _, v: v + x, y)

    changed = rewrite_jaxpr(traced(f, X), None, add_to_mul)
    np.testing.assert_array_equal(run(changed, X), X**4)


def test_a_shared_jaxpr_stays_one():
    double = jax.jit(lambda v: v + v)
    changed = rewrite_jaxpr(traced(lambda x: double(double(x)), X), None, add_to_mul)
    one, other = (e.params["jaxpr"].jaxpr for e in changed.eqns)
    assert one is other


def test_maps_are_left_alone_if_asked():
    jaxpr = traced(sm.spmap(lambda v: v + 1), X)
    for into_maps, expected in ((True, X), (False, X + 1)):
        changed = rewrite_jaxpr(jaxpr, None, add_to_mul, into_maps=into_maps)
        np.testing.assert_array_equal(run(changed, X), expected)


def test_a_map_that_binds_the_name_again_is_said_to():
    seen = []

    def look(equation, shadowed):
        seen.append((equation.primitive.name, shadowed))
        return equation

    def f(x):
        inner = sm.spmap(lambda v: lax.sin(lax.psum(v, "i")), "i")
        return lax.cos(inner(x)) + lax.psum(x, "i")

    rewrite_jaxpr(traced(f, X, i=2), "i", look)
    assert dict(seen)["sin"] is True
    assert dict(seen)["cos"] is False


def test_renamed_axes_are_renamed_in_effects_at_every_level():
    def f(x):
        return jax.jit(lambda v: lax.psum(v, "i"))(x) + lax.psum(x, "j")

    jaxpr = traced(f, X, i=2, j=3)
    for renamed, expected in ((["k"], {"k", "j"}), ([], {"j"})):
        changed = rewrite_jaxpr(jaxpr, "i", lambda e, _: e, renamed=renamed)
        assert axes_used(changed.effects) == expected
        assert axes_used(changed.eqns[0].effects) == expected - {"j"}


def test_one_equation_may_become_several():
    def twice(equation, shadowed):
        if equation.primitive is not add_p:
            return equation
        between = jax.extend.core.Var(equation.outvars[0].aval)
        again = equation.replace(invars=[between, equation.invars[1]])
        return [equation.replace(outvars=[between]), again]

    changed = rewrite_jaxpr(traced(lambda x: x + 1, X), None, twice)
    np.testing.assert_array_equal(run(changed, X), X + 2)


def test_variables_get_other_types_and_references_follow():
    def f(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    jaxpr = traced(f, X)
    changed = rewrite_jaxpr(jaxpr, None, lambda e, _: e, retype=lambda aval: aval)
    made = {var for e in changed.eqns for var in e.outvars}
    inputs = {e.input for q in changed.eqns for e in q.effects if hasattr(e, "input")}
    assert inputs
    assert inputs <= made
    assert not made & {var for e in jaxpr.eqns for var in e.outvars}


def test_effects_that_go_leave_the_jaxpr_too():
    def without_taps(equation, shadowed):
        return [] if equation.primitive.name == "tap" else equation

    def f(x):
        sm.tap(lambda _: None, x)
        return jnp.sin(x)

    changed = rewrite_jaxpr(traced(f, X), None, without_taps)
    assert changed.effects == set()
    assert [e.primitive.name for e in equations(changed)] == ["sin"]
