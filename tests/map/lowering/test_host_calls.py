"""What calls the host, and on which devices of several that compute the same."""

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap._jax.walk import equations
from shardmap.map.layout import MeshWalk
from shardmap.map.lowering.host_calls import (
    calls_host,
    happens_here,
    has_effect,
    on_first_devices,
    one_at_a_time,
)

X = jax.ShapeDtypeStruct((3,), np.float32)


def mesh(**sizes):
    return sm.make_mesh(sizes, devices=jax.devices()[:8])


def printing(x):
    jax.debug.print("{}", x)
    return x


def tapped(x):
    return sm.tap(lambda x: None, x)


def pure(x, **options):
    return jax.pure_callback(lambda x: x, x, x, **options)


def traced(fun):
    return jax.make_jaxpr(fun)(X).jaxpr


@pytest.mark.parametrize("fun", [printing, tapped])
def test_effects_here_and_in_what_an_equation_holds(fun):
    (direct,) = filter(has_effect, traced(fun).eqns)
    assert happens_here(direct)
    (held,) = traced(jax.jit(fun)).eqns
    assert has_effect(held)
    assert not happens_here(held)


@pytest.mark.parametrize(
    ("fun", "axes", "walked", "expected"),
    [
        (lambda x: x, {"a": 4, "b": 2}, ("a",), False),
        (printing, {"a": 4, "b": 2}, ("a", "b"), False),
        (printing, {"a": 4, "b": 2}, ("a",), False),
        (printing, {"a": 2, "b": 2, "c": 2}, ("a",), True),
        (tapped, {"a": 4, "b": 2}, ("a",), True),
        (pure, {"a": 4, "b": 2}, ("a",), True),
    ],
)
def test_what_needs_all_axes_of_the_mesh(fun, axes, walked, expected):
    assert calls_host(traced(fun), mesh(**axes), walked) is expected


def test_a_pure_callback_is_for_one_element():
    (call,) = equations(one_at_a_time(traced(pure)))
    assert call.params["vmap_method"] == "sequential"


def test_a_pure_callback_that_is_told_how_stays():
    jaxpr = traced(lambda x: pure(x, vmap_method="expand_dims"))
    assert one_at_a_time(jaxpr) is jaxpr


def test_a_callback_is_called_on_the_first_device_of_the_axes_left():
    jaxpr = on_first_devices(traced(printing), mesh(a=2, b=4), MeshWalk(("a",), ()))
    found = list(equations(jaxpr))
    assert [e.params["axis_name"] for e in found if e.primitive.name == "axis_index"]
    (choice,) = [e for e in found if e.primitive is lax.cond_p]
    assert len(choice.params["branches"]) == 2


def test_a_tap_says_itself_where_it_is():
    jaxpr = on_first_devices(traced(tapped), mesh(a=2, b=4), MeshWalk(("a",), ()))
    assert not any(e.primitive is lax.cond_p for e in equations(jaxpr))
