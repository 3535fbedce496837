"""What calls the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.map.lowering.effects import (
    calls_host,
    happens_here,
    has_effect,
)

X = jax.ShapeDtypeStruct((3,), np.float32)


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


@pytest.mark.parametrize("fun", [printing, tapped, pure, jax.jit(tapped)])
def test_what_calls_the_host(fun):
    assert calls_host(traced(fun))
    assert not calls_host(traced(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)))
