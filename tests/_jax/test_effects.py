"""Which effects JAX has, and how it treats the one of our own."""

import functools

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

from shardmap._jax import effects

X = np.ones(3, np.float32)


def effects_of(fun, *args):
    return jax.make_jaxpr(fun, axis_env=[("i", 2), ("j", 3)])(*args).jaxpr.effects


def test_the_use_of_an_axis_names_it():
    found = effects_of(lambda x: lax.psum(x, ("i", "j")), X)
    assert effects.axes_used(found) == {"i", "j"}
    [left] = effects.without_axis(found, "i")
    assert effects.axis_of(left) == "j"
    assert effects.axis_of(effects.with_axis(left, ("k", 1))) == ("k", 1)


def test_other_effects_use_no_axis():
    for effect in {*effects.io_effects(), effects.DEBUG_EFFECT, effects.TAP_EFFECT}:
        assert effects.axis_of(effect) is effects.NO_AXIS
    assert effects.axes_used(effects.io_effects()) == set()


def test_what_happens_outside():
    def with_reference(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    called = effects_of(lambda: jax.debug.callback(lambda: None))
    assert all(map(effects.has_external_effect, {*called, *effects.io_effects()}))
    inner = [
        effect
        for equation in jax.make_jaxpr(with_reference)(X).jaxpr.eqns
        for effect in equation.effects
    ]
    assert inner
    assert not any(map(effects.has_external_effect, inner))
    assert not any(
        map(effects.has_external_effect, effects_of(lambda: lax.axis_index("i")))
    )


def test_references_made_inside_leave_no_effect():
    made = effects_of(lambda x: jax.freeze(jax.new_ref(x)), X)
    tapped = {*made, effects.TAP_EFFECT}
    assert effects.without_references(tapped) == {effects.TAP_EFFECT}


def test_effects_on_variables_go_to_the_new_ones():
    def reads(x):
        ref = jax.new_ref(x)
        return ref[...]

    jaxpr = jax.make_jaxpr(reads)(X).jaxpr
    on_variables = {e for eqn in jaxpr.eqns for e in eqn.effects if hasattr(e, "input")}
    assert on_variables
    changed = effects.on_variables(on_variables, lambda var: ("new", var))
    assert all(effect.input[0] == "new" for effect in changed)
    assert effects.on_variables({effects.TAP_EFFECT}, None) == {effects.TAP_EFFECT}


def test_io_callbacks_have_the_effects_that_are_expected():
    for ordered in (False, True):
        call = functools.partial(io_callback, lambda: None, None, ordered=ordered)
        assert effects_of(call) <= effects.io_effects()
    assert len(effects.io_effects()) == 2
