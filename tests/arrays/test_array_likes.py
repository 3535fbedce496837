"""Values that are not JAX arrays: each device reads its slice, or a handler does."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.arrays import array_likes
from shardmap.arrays.array_likes import (
    abstract_value,
    device_put_array_like,
    is_array_like,
)
from shardmap.arrays.placement import device_put, is_misplaced, place
from shardmap.planning.sources.registry import register_shard_handler
from tests.map_programs import both_lowerings

HOST = np.arange(16 * 6, dtype=np.float32).reshape(16, 6)


class Counting:
    """An array-like that remembers what was read of it."""

    def __init__(self, values):
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype
        self.reads = []
        self._lock = threading.Lock()

    def __getitem__(self, index):
        part = self._values[index]
        with self._lock:
            self.reads.append((index, part.shape))
        return part


def over(count, pspec):
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), "i"), pspec)


def check(array, sharding, value=HOST):
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


@pytest.mark.parametrize("uncommitted", [False, True])
def test_each_device_reads_its_own_slice(uncommitted):
    value, sharding = Counting(HOST), over(8, P("i"))
    assert is_misplaced(value, sharding, uncommitted)
    (array,) = place([value], [sharding], uncommitted)
    check(array, sharding)
    assert [shape for _, shape in value.reads] == [(2, 6)] * 8
    starts = sorted(index[0].start for index, _ in value.reads)
    assert starts == list(range(0, 16, 2))


def test_slices_are_plain():
    value = Counting(HOST)
    device_put(value, over(2, P(None, "i")))
    assert sorted(str(index) for index, _ in value.reads) == [
        "(slice(0, 16, None), slice(0, 3, None))",
        "(slice(0, 16, None), slice(3, 6, None))",
    ]


def test_what_several_devices_hold_is_read_once():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    value, sharding = Counting(HOST), NamedSharding(mesh, P("a"))
    check(device_put(value, sharding), sharding)
    assert [shape for _, shape in value.reads] == [(8, 6)] * 2


def test_wide_values_are_narrowed_slice_by_slice():
    value = Counting(HOST.astype(np.float64))
    array = device_put(value, over(8, P("i")))
    assert array.dtype == np.float32
    assert abstract_value(value).dtype == np.float32
    assert len(value.reads) == 8


def test_a_scalar_array_like():
    value = Counting(np.array(3.0, np.float32))
    assert device_put(value, over(4, P())) == 3
    assert [index for index, _ in value.reads] == [()]


@pytest.fixture
def memmap(tmp_path):
    stored = np.memmap(tmp_path / "x.bin", np.float64, "w+", shape=HOST.shape)
    stored[:] = HOST
    return np.memmap(tmp_path / "x.bin", np.float64, "r", shape=HOST.shape)


def test_h5py(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        stored = file.create_dataset("x", data=HOST)
        check(device_put(stored, over(8, P("i"))), over(8, P("i")))


def test_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    stored = zarr.create_array(tmp_path / "x.zarr", data=HOST, chunks=(2, 6))
    check(device_put(stored, over(8, P("i"))), over(8, P("i")))


# Handlers


class Remote:
    """A type that cannot be indexed."""

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype


class Derived(Remote):
    pass


@pytest.fixture
def handlers(monkeypatch):
    """The handlers, which a test may change."""
    monkeypatch.setattr(array_likes, "HANDLERS", {})


def from_callback(value, sharding):
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value.values[index]
    )


@pytest.mark.parametrize("cls", [Remote, Derived])
def test_a_handler_lays_out_its_type_and_those_derived(cls, handlers):
    value, sharding = cls(HOST), over(8, P("i"))
    assert not is_array_like(value)
    register_shard_handler(Remote, from_callback)
    assert abstract_value(value).shape == (16, 6)
    (array,) = place([value], [sharding])
    check(array, sharding)


def test_the_nearest_and_latest_handler_counts(handlers):
    def negative(value, sharding):
        return jax.device_put(-value.values, sharding)

    register_shard_handler(Remote, from_callback)
    register_shard_handler(Derived, negative)
    sharding = over(8, P("i"))
    check(device_put_array_like(Remote(HOST), sharding), sharding)
    check(device_put_array_like(Derived(HOST), sharding), sharding, -HOST)
    register_shard_handler(Remote, negative)
    check(device_put_array_like(Remote(HOST), sharding), sharding, -HOST)


def test_a_handler_goes_before_indexing(handlers):
    value = Counting(HOST)
    register_shard_handler(Counting, lambda v, s: jax.device_put(np.zeros(v.shape), s))
    check(
        device_put_array_like(value, over(8, P("i"))),
        over(8, P("i")),
        np.zeros_like(HOST),
    )
    assert value.reads == []


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda s: HOST, r"for Remote must give a jax.Array of shape \(16, 6\) and"),
        (lambda s: jax.device_put(HOST[:8], s), "not Array"),
        (lambda s: jax.device_put(HOST.astype(int), s), "and dtype float32, not"),
        (
            lambda s: jax.device_put(HOST, jax.devices()[0]),
            "for Remote must give an array with NamedSharding.*, not with SingleDevice",
        ),
    ],
)
def test_what_a_handler_must_not_give(result, message, handlers):
    register_shard_handler(Remote, lambda value, sharding: result(sharding))
    with pytest.raises(ValueError, match=message):
        device_put_array_like(Remote(HOST), over(8, P("i")))


@pytest.mark.parametrize(
    "cls", [jax.Array, np.ndarray, np.float32, int, bool, float, complex]
)
def test_types_that_jax_lays_out_have_no_handlers(cls):
    with pytest.raises(ValueError, match=f"how {cls.__name__} is laid out: JAX does"):
        register_shard_handler(cls, from_callback)


def test_bad_registrations():
    with pytest.raises(TypeError, match=r"takes a type, got \[\]"):
        register_shard_handler([], from_callback)
    with pytest.raises(TypeError, match="a value and a sharding, got 3 for Remote"):
        register_shard_handler(Remote, 3)
    text = (
        r"the one for Remote takes \(x, devices, indices\)\. .* is registered by "
        r"shardmap\.compat\.shard_arg_handlers\[Remote\] = handler"
    )
    with pytest.raises(TypeError, match=text):
        register_shard_handler(Remote, lambda x, devices, indices: [])


# In calls


def test_a_map_reads_each_row_on_its_device():
    value = Counting(HOST[:8])
    f = sm.spmap(lambda x, y: (x + y).sum(), in_axes=(0, None))
    for _ in range(2):
        np.testing.assert_array_equal(f(value, 1.0), (HOST[:8] + 1).sum(1))
    assert [shape for _, shape in value.reads] == [(1, 6)] * 16


def test_a_map_over_a_memmap(memmap):
    f = sm.spmap(lambda x: x.sum())
    np.testing.assert_array_equal(f(memmap[:8]), HOST[:8].sum(1))


def test_a_map_over_a_registered_type(handlers):
    register_shard_handler(Remote, from_callback)
    f = sm.spmap(lambda x: x * 2)
    for rows in (8, 4, 8):
        np.testing.assert_array_equal(f(Remote(HOST[:rows])), HOST[:rows] * 2)


def test_array_likes_in_trees_and_keywords():
    f = sm.spmap(lambda tree, *, scale: tree["x"] * scale)
    value = {"x": Counting(HOST[:8])}
    np.testing.assert_array_equal(
        f(value, scale=Counting(HOST[:8])), HOST[:8] * HOST[:8]
    )


@both_lowerings
def test_array_likes_under_jit_and_in_a_long_axis(spmap):
    mapped = spmap(lambda x: x.sum())
    np.testing.assert_array_equal(mapped(Counting(HOST)), HOST.sum(1))
    outside = Counting(HOST)
    np.testing.assert_array_equal(jax.jit(lambda: mapped(outside))(), HOST.sum(1))


def test_one_device(memmap):
    there = SingleDeviceSharding(jax.devices()[2])
    check(device_put(memmap, there), there)
