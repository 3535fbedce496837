"""Maps under JAX's settings that look for NaN and infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

X = np.zeros(4, np.float32)
MESH = sm.make_mesh({"x": 4, "y": 2})


def singular(x):
    return jnp.sqrt(x) * 0


def total(mapped):
    return lambda x: mapped(x).sum()


PROGRAMS = {
    "grad(map(jit))": jax.grad(total(sm.spmap(jax.jit(singular)))),
    "map(grad(jit))": sm.spmap(jax.grad(jax.jit(singular))),
    "map(jit(jit))": lambda x: sm.spmap(jax.jit(jax.jit(jnp.log)))(x - 1),
    "map(map(jit))": lambda x: sm.spmap(sm.spmap(jax.jit(jnp.log)))(x[None] - 1),
    "in a scan": lambda x: sm.spmap(
        lambda x: lax.scan(lambda c, _: (jax.jit(jnp.log)(c), None), x - 1, None, 2)[0]
    )(x),
    "in checkpoint": jax.grad(total(sm.spmap(jax.checkpoint(jax.jit(singular))))),
    "mesh_map": lambda x: sm.mesh_map(jax.jit(jnp.log), MESH, {"x": 0}, {"x": 0})(
        x - 1
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_nan_is_a_floating_point_error(program):
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"[iI]nvalid value \(nan\)"),
    ):
        PROGRAMS[program](X)


@pytest.mark.parametrize("function", [jnp.log, jax.jit(jnp.log)])
def test_an_infinity_is_a_floating_point_error(function):
    with (
        jax.debug_infs(True),
        pytest.raises(FloatingPointError, match=r"invalid value \(inf\)"),
    ):
        sm.spmap(function)(X)


def test_profiles_show_the_names_of_maps_and_their_axes():
    inner = sm.spmap(lambda y: jnp.sin(y), "model")
    step = sm.spmap(lambda x: inner(x), "data")
    text = step.lower(np.ones((2, 4), np.float32)).compile().as_text()
    assert "spmap(<lambda>, data)/shard_map/spmap(<lambda>, model)" in text
    unnamed = sm.spmap(jnp.sin).lower(np.ones(8, np.float32)).compile().as_text()
    assert "spmap(sin)/" in unnamed
