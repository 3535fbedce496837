"""Which equations are collectives over an axis, and how they wait for a block."""

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap._jax.walk import equations
from shardmap.map.collectives.split import (
    has_collectives,
    lowers_per_device,
    split_collectives,
    split_p,
    uses_axis,
)
from shardmap.map.primitives.axis import AxisLayout
from tests.map_programs import float_index

X = np.ones(3, np.float32)


def jaxpr_of(fun):
    return jax.make_jaxpr(fun, axis_env=[("i", 4), ("o", 2)])(X).jaxpr


def used(fun, name="i"):
    return [e.primitive.name for e in uses_axis(jaxpr_of(fun), name)]


def test_collectives_over_an_axis_are_found_wherever_they_are():
    def fun(x):
        x = lax.cond(x.sum() > 0, lambda x: lax.pmax(x, "i"), lambda x: x, x)
        return jax.jit(lambda x: lax.ppermute(x, "i", [(0, 1)]))(x)

    assert sorted(used(fun)) == ["pmax", "ppermute"]
    assert used(fun, "o") == []
    assert used(lambda x: lax.pmin(x, ("o", "i"))) == ["pmin"]
    # A map inside that binds the name again has its own.
    assert used(sm.spmap(lambda x: lax.pmax(x, "i"), "i")) == []
    assert used(sm.spmap(lambda x: lax.pmax(x, "i"), "j")) == ["pmax"]


def test_indices_send_nothing():
    assert not has_collectives(jaxpr_of(lambda x: x + float_index("i")))
    assert has_collectives(jaxpr_of(lambda x: lax.psum(x, "i")))


def test_collectives_wait_for_a_block_and_have_no_effect_of_the_axis():
    axis = AxisLayout("i", 4)
    jaxpr = jaxpr_of(jax.jit(lambda x: lax.pmax(x, "i") + float_index("o")))
    split = split_collectives(jaxpr, axis)
    (waiting,) = [e for e in equations(split) if e.primitive is split_p]
    assert waiting.params["axis"] == axis
    assert waiting.params["collective"].name == "pmax"
    assert uses_axis(split, "i") == []
    assert len(uses_axis(split, "o")) == 1


@pytest.mark.parametrize(
    ("fun", "per_device"),
    [
        (lambda x: x, True),
        (lambda x: lax.psum(x, "i"), True),
        (lambda x: lax.pmax(lax.complex(x, x), "i"), False),
    ],
)
def test_what_lowers_for_one_element_on_each_device(fun, per_device):
    assert lowers_per_device(jaxpr_of(fun), "i", "cpu") is per_device
