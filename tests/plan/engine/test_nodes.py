"""Functions as flat programs."""

import jax
import jax.numpy as jnp
import pytest

from shardmap.plan.engine.nodes import Refused, Value, flatten
from tests.plan.engine.toys import CALLS, CUT, analysed


def test_an_effect_is_refused_by_name():
    with pytest.raises(Refused, match=r"debug_print at .*test_nodes.py"):
        analysed(lambda x: jax.debug.print("x"), (6,), cuts=[[CUT]])


def test_a_constant_is_kept_once():
    big = jnp.arange(6.0)
    graph = flatten(jax.make_jaxpr(lambda x: jnp.sin(x + big) + big)(big), CALLS)
    assert len(graph.constants) == 1
    assert all(isinstance(value, Value) for value in graph.constants)
