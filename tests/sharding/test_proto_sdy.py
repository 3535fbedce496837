"""Specs as Shardy writes them."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given

from shardmap.sharding.entries import Chunked, Replicated, ShardedAxis
from shardmap.sharding.spec import ShardingSpec
from tests.strategies import specs

C, S, R = Chunked, ShardedAxis, Replicated


def test_sdy_in_text():
    spec = ShardingSpec((C((2, 3)), None), (S(1), R(5), S(0)))
    assert spec.sdy() == (
        'sdy.mesh @mesh = <["axis0"=3, "axis1"=5, "axis2"=2]>\n'
        '#sdy.sharding<@mesh, [{"axis2", "axis0"}, {}]>'
    )
    assert spec.sdy(["x", "y", "z"]).endswith('[{"z", "x"}, {}]>')
    assert ShardingSpec((C(2),), (S(0),)).sdy("data") == (
        'sdy.mesh @mesh = <["data"=2]>\n#sdy.sharding<@mesh, [{"data"}]>'
    )


@given(specs(unstacked=False, max_devices=8, max_ndim=3))
def test_sdy_is_what_jax_prints_when_it_lowers_the_named_sharding(spec):
    named = spec.named_sharding(jax.devices()[: spec.num_shards])
    x = jax.ShapeDtypeStruct(spec.tile_counts, np.float32)
    text = jax.jit(lambda x: x, in_shardings=named).lower(x).as_text()
    mesh, sharding = spec.sdy().split("\n")
    assert f"{mesh} {{" in text
    assert re.search(r"sdy\.sharding = (.*?>)}", text)[1] == sharding


@pytest.mark.parametrize("names", [["x"], ["x", "y", "z"], ["x", "x"], "xy"])
def test_refuses_axis_names_that_do_not_fit_the_mesh(names):
    spec = ShardingSpec((C(2),), (S(0), R(2)))
    text = "axis_names must be 2 different names, one per mesh dimension of .*, got "
    with pytest.raises(ValueError, match=text):
        spec.sdy(names)
    with pytest.raises(ValueError, match=text):
        spec.named_sharding(jax.devices()[:4], names)
