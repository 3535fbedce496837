"""What depends on no argument is known when it is planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.engine.nodes import flatten
from shardmap.plan.lax.indexed.evaluated import MOST_ELEMENTS, evaluated
from shardmap.plan.lax.table import CALLS

KNOWN = {
    "tril": lambda: jnp.stack(jnp.tril_indices(7)),
    "triu": lambda: jnp.triu_indices(6, 1)[1],
    "a step": lambda: jnp.arange(2, 30, 3)[::-1],
    "negative": lambda: jnp.array([-3, 1, 2]) % 7 - jnp.array([-7, 7, -8]) // 3,
    "clipped": lambda: jnp.clip(jnp.arange(-3, 5), 0, 3),
    "repeated": lambda: jnp.repeat(jnp.arange(4), 3) + jnp.tile(jnp.arange(3), 4),
    "a grid": lambda: jnp.stack(jnp.meshgrid(jnp.arange(3), jnp.arange(4))).T,
    "chosen": lambda: jnp.where(jnp.arange(5) > 2, jnp.arange(5), 9),
    "wrapped": lambda: jnp.arange(5, dtype=jnp.uint8) * np.uint8(70),
    "shifted": lambda: jnp.roll(jnp.cumsum(jnp.arange(5)[::-1]), 2),
}


def found(function, *args):
    graph = flatten(jax.make_jaxpr(function)(*args), CALLS)
    return evaluated(graph.outputs[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KNOWN)
def test_indices_are_those_of_jax(name):
    want = np.asarray(KNOWN[name]())
    got = found(KNOWN[name])
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


def test_what_depends_on_an_argument_is_not_known():
    assert found(lambda k: jnp.arange(3) + k, 1) is None
    assert found(lambda: jnp.arange(MOST_ELEMENTS + 1) + 1) is None
    assert found(lambda: jnp.arange(3.0)) is None
    assert found(lambda: jnp.argsort(jnp.array([3, 1]))) is None
