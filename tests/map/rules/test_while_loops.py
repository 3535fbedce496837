"""The one rule of JAX's own that is replaced: only for loops with effects of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map_programs import LOWERINGS


def counted(tapped):
    """Steps until 2; each element takes its own number of them."""

    def goes_on(x):
        is_less = x < 2
        return sm.tap(lambda _: None, is_less) if tapped else is_less

    return lambda x: lax.while_loop(goes_on, lambda x: x + 1, x)


@pytest.mark.parametrize("tapped", [False, True])
def test_elements_that_have_ended_stay_as_they_are(tapped):
    got = jax.vmap(counted(tapped))(np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(got, [2, 2, 2, 3, 4])


def test_loops_without_taps_are_vectorised_by_jax():
    x = np.arange(5, dtype=np.int32)
    [loop] = jax.make_jaxpr(jax.vmap(counted(False)))(x).eqns
    [condition] = loop.params["cond_jaxpr"].jaxpr.eqns
    assert condition.primitive.name == "lt"


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_functions_inside_keep_their_constants(lowering):
    """An array that a jitted function closes over is a constant of its jaxpr."""
    weights = jnp.arange(5, dtype=np.float32)
    added = jax.jit(lambda x: x + weights.sum())

    def rounds(x):
        def more(carry):
            return sm.tap(lambda v: None, carry[0]) < 2

        return lax.while_loop(more, lambda c: (c[0] + 1, added(c[1])), (0, x))[1]

    for size in 8, 16:
        x = np.arange(size, dtype=np.float32)
        result = jax.jit(sm.spmap(rounds, lowering=lowering))(x)
        np.testing.assert_array_equal(result, x + 20)
