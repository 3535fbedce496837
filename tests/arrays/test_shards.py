"""Pieces of arrays: the right values, from the right device, and from no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardmap import shard_of, unreplicate, unstack

HOST = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)


def over(pspec, shape=(8,), names="i", devices=slice(None)):
    grid = np.array(jax.devices())[devices].reshape(shape)
    return NamedSharding(Mesh(grid, tuple(names)), pspec)


def rows(value=HOST, devices=slice(None)):
    return jax.device_put(value, over(P("i"), (-1,), devices=devices))


def check(piece, value, device):
    assert piece.devices() == {device}
    assert isinstance(piece.sharding, SingleDeviceSharding)
    assert piece.dtype == value.dtype
    np.testing.assert_array_equal(piece, value)


@pytest.mark.parametrize("i", [0, 7, -8, np.int64(3)])
def test_an_element_is_on_its_own_device(i):
    check(shard_of(rows(), i), HOST[i], jax.devices()[i])


def test_pieces_meet_arrays_on_any_device():
    elsewhere = jax.device_put(HOST[0], jax.devices()[6])
    for k, piece in enumerate(unstack(rows())):
        assert not piece.committed
        total = piece + elsewhere
        check(total, HOST[k] + HOST[0], jax.devices()[6])
    x = rows()
    check(shard_of(x, 1) + shard_of(x, 2), HOST[1] + HOST[2], jax.devices()[0])


# Layouts

SOFT = np.arange(16 * 6, dtype=np.int32).reshape(16, 6)


def test_all_of_blocks_of_more_than_one_element():
    pieces = unstack(rows(SOFT))
    assert len(pieces) == 16
    for k, piece in enumerate(pieces):
        check(piece, SOFT[k], jax.devices()[k // 2])


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis(axis):
    array = jax.device_put(SOFT, over(P(None, "i"), devices=slice(3), shape=(3,)))
    check(shard_of(array, 3, axis=axis), SOFT[:, 3], jax.devices()[1])
    for k, piece in enumerate(unstack(array, axis=axis)):
        check(piece, SOFT[:, k], jax.devices()[k // 2])
    check(unreplicate(array, axis=axis), SOFT[:, 0], jax.devices()[0])


def test_an_array_on_one_device():
    array = jax.device_put(SOFT, jax.devices()[5])
    check(shard_of(array, 9), SOFT[9], jax.devices()[5])
    assert all(piece.devices() == {jax.devices()[5]} for piece in unstack(array))


def test_empty_arrays():
    empty = jax.device_put(np.zeros((8, 0)), over(P("i")))
    assert shard_of(empty, 2).shape == (0,)
    assert unstack(jnp.zeros((0, 3))) == []
    cut = jax.device_put(np.zeros((2, 0, 4)), over(P("i", "j"), (2, 4), "ij"))
    assert [part.shape for part in unstack(cut)] == [(0, 4)] * 2


def test_dtypes_and_weak_types():
    for dtype in [np.bool_, np.int8, jnp.bfloat16, np.complex64]:
        value = np.arange(8).astype(dtype)
        check(shard_of(rows(value), 2), value[2], jax.devices()[2])
    weak = jnp.broadcast_to(jnp.asarray(1.0), (4,))
    assert weak.weak_type
    assert shard_of(weak, 0).weak_type


def test_settings_of_jax_around_a_call():
    array = rows()
    with jax.set_mesh(jax.make_mesh((8,), ("i",))):
        check(shard_of(array, 3), HOST[3], jax.devices()[3])
        added = jax.jit(lambda v: shard_of(array, 3) + v)(np.ones(3, np.float32))
        np.testing.assert_array_equal(added, HOST[3] + 1)
    with jax.default_device(jax.devices()[1]), jax.disable_jit():
        check(shard_of(array, 4), HOST[4], jax.devices()[4])
    with jax.enable_x64(True):
        wide = rows(HOST.astype(np.float64))
    check(shard_of(wide, 2), HOST[2].astype(np.float64), jax.devices()[2])


# Trees


def tree():
    return {
        "w": rows(),
        "b": (rows(SOFT), jax.device_put(HOST, over(P()))),
        "host": HOST,
        "none": None,
    }


def test_unreplicate():
    first = unreplicate(tree())
    check(first["w"], HOST[0], jax.devices()[0])
    check(first["b"][0], SOFT[0], jax.devices()[0])
    check(first["b"][1], HOST[0], jax.devices()[0])
    np.testing.assert_array_equal(first["host"], HOST[0])


# Under transformations: x[i]


def test_a_deleted_array():
    array = rows(HOST + 1)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        shard_of(array, 0)


# Errors


@pytest.mark.parametrize("i", [8, -9])
@pytest.mark.parametrize("value", [HOST, rows], ids=["host", "devices"])
def test_out_of_range(i, value):
    array = value() if callable(value) else value
    message = (
        rf"shard_of: x\[0\] of shape \(8, 3\) has size 8 along axis 0: index {i} is out"
    )
    with pytest.raises(IndexError, match=message):
        shard_of([array], i)
    with pytest.raises(IndexError, match=f"index {i} is out of range"):
        jax.jit(lambda x: shard_of(x, i))(array)


def test_no_such_axis():
    with pytest.raises(
        ValueError, match=r"shard_of: x of shape \(8, 3\) has no axis 2"
    ):
        shard_of(rows(), 0, axis=2)
    with pytest.raises(ValueError, match=r"unreplicate: x\[1\] of shape \(\) has no"):
        unreplicate([HOST, 1.0])


def test_lengths_that_differ():
    message = r"elements along axis 0: x\['a'\] has 8, x\['b'\] has 16$"
    with pytest.raises(ValueError, match=message):
        unstack({"a": rows(), "b": rows(SOFT)})
    with pytest.raises(
        ValueError, match=r"unstack needs arrays to take apart, got {}$"
    ):
        unstack({})


def test_an_index_that_is_none():
    for index, shown in ((1.0, "1.0"), ("a", "'a'"), ((0, "a"), "'a'")):
        message = f"shard_of takes an int or a tuple of ints .* got {shown} "
        with pytest.raises(TypeError, match=message):
            shard_of(rows(), index)
