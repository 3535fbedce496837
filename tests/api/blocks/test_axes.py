"""Mesh axes that cut dimensions, and blocks that come to the front and go back."""

import operator

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.api.blocks import axes

MESH = sm.make_mesh({"x": 2, "y": 4})
ARRAY = np.arange(2 * 16 * 3).reshape(2, 16, 3)
CUTS = [{}, {"x": 0}, {"y": 1}, {"x": 1, "y": 1}, {"y": 1, "x": 1}, {"y": 1, "x": 0}]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("levels", [("x", "y"), ("y", "x")])
def test_blocks_come_to_the_front_and_go_back(cut, levels):
    blocks = axes.to_blocks(ARRAY, cut, levels, MESH)
    block = axes.scaled(MESH, operator.floordiv, jax.typeof(ARRAY), cut)
    front = tuple(MESH.shape[name] for name in levels if name in cut)
    assert blocks.shape == (*front, *block.shape)
    np.testing.assert_array_equal(axes.from_blocks(blocks, cut, levels), ARRAY)
    whole = axes.scaled(MESH, operator.mul, block, cut)
    assert whole.shape == ARRAY.shape


@pytest.mark.parametrize("cut", CUTS)
def test_a_block_is_what_the_device_has(cut):
    placed = jax.device_put(ARRAY, axes.sharding_of(cut, MESH))
    levels = tuple(cut)
    blocks = axes.to_blocks(ARRAY, cut, levels, MESH)
    for x, y in np.ndindex(2, 4):
        at = {"x": x, "y": y}
        shard = placed.addressable_shards[4 * x + y]
        assert shard.device == MESH.devices[x, y]
        np.testing.assert_array_equal(blocks[*(at[n] for n in levels)], shard.data)


def test_dimensions_have_their_axes_major_to_minor():
    assert axes.dimensions_of({"y": 1, "x": 1}, 2) == [(), ("y", "x")]
    assert axes.is_axes({"x": 0})
    assert not any(map(axes.is_axes, [{"x": True}, {0: 0}, 0, None]))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": "0"}, TypeError, "mesh_map in_axes must be dicts of mesh axis names"),
        ({"z": 0}, ValueError, r"in_axes names \['z'\], but the mesh has the axes"),
        ([{"x": -1}], ValueError, r"in_axes has a dimension below 0 in {'x': -1}"),
    ],
)
def test_what_are_no_axes_of_the_mesh_is_refused(given, error, message):
    axes.check_names("in_axes", ({"x": 0, "y": 3}, {}), MESH)
    with pytest.raises(error, match=message):
        axes.check_names("in_axes", given, MESH)
