"""One call of `mesh_map`, read: where its blocks are."""

import numpy as np
from jax import lax

import shardmap as sm

MESH = sm.make_mesh({"x": 4, "y": 2})
X = np.ones((8, 6), np.float32)


def read(fun, in_axes, out_axes, *args):
    mapped = sm.mesh_map(fun, MESH, in_axes, out_axes)
    return mapped._programs.read(args, {})


def test_a_call_knows_its_devices_arrays_and_what_it_is():
    call = read(lambda x: x.sum(0), ({"x": 0, "y": 1},), {"y": 0}, X)
    (operand,), (result,) = call.shardings
    assert operand.shard_shape(X.shape) == (2, 3)
    assert result.shard_shape((6,)) == (3,)
    operands, results = call.global_avals
    assert [aval.shape for aval in (*operands, *results)] == [(8, 6), (6,)]
    assert call.described == (
        "blocks on mesh {'x': 4, 'y': 2}, devices [0, 1, 2, 3, 4, 5, 6, 7], "
        "arguments ['float32[8,6]']"
    )
    assert call.process_local is None


def test_a_call_knows_whether_blocks_talk():
    assert not read(lambda x: x, {"x": 0}, {"x": 0}, X).communicates
    assert read(lambda x: lax.psum(x, "x"), {"x": 0}, {}, X).communicates


def test_equal_options_have_one_key():
    def key(in_axes):
        return hash(sm.mesh_map(abs, MESH, in_axes, {})._programs.options.key())

    assert key(({"x": 0},)) == key(({"x": 0},))
    # The order of the names is that of the cuts.
    kinds = [{"x": 0, "y": 0}, {"y": 0, "x": 0}, ({"x": 0},), [{}], {"x": 1}]
    assert len({*map(key, kinds)}) == len(kinds)
