"""Which way a map is lowered: decided once, for lowering and for what explains."""

import jax
import numpy as np
import pytest

import shardmap as sm


def test_an_inner_map_that_gathers_is_explained_so():
    """Its elements are on devices; what calls the host has all results on each."""

    def outer(x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        total = jax.pure_callback(lambda x: x, shape, x.sum())
        return sm.spmap(lambda x: x * 2, "j")(x) + total

    mapped = sm.spmap(outer, "i", devices=jax.devices()[:4])
    x = jax.ShapeDtypeStruct((2, 2, 3), np.float32)
    report = sm.explain(mapped)(x)
    assert [each.operation for each in report.collectives] == ["all_gather"]


def test_a_function_called_block_is_the_users():
    def block(x):
        return x * 2

    mapped = sm.spmap(block, "i")
    x = np.ones((8, 3), np.float32)
    assert sm.explain(mapped)(x).axes[0].kind == "spmap"
    mesh = sm.make_mesh({"data": 8})
    for function in (block, lambda x: x * 2):
        blocks = sm.mesh_map(function, mesh, ({"data": 0},), {"data": 0})
        assert sm.explain(blocks)(x).axes[0].kind == "shard_map"


def test_messages_name_the_map_that_the_user_wrote():
    mesh = sm.make_mesh({"a": 4, "b": 2})

    def double(x):
        return x * 2

    def step(x):
        other = sm.make_mesh({"a": 2, "b": 4})
        return sm.mesh_map(double, other, ({"a": 0},), {"a": 0})(x)

    mapped = sm.mesh_map(step, mesh, ({"b": 0},), {"b": 0})
    with pytest.raises(ValueError, match=r"^mesh_map of double names the mesh") as info:
        mapped(np.ones((8, 3), np.float32))
    assert "spmap of" not in str(info.value)
    assert "block" not in str(info.value)
