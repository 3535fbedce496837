"""Laying out what a map is given: what stays as it is, and how the rest gets there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardmap.arrays.placement import device_put, place
from tests.strategies import specs

HOST = np.arange(24 * 24, dtype=np.float32).reshape(24, 24)


def over(devices, pspec, name="i"):
    return NamedSharding(Mesh(np.array(devices), name), pspec)


def rows():
    return jax.device_put(HOST, over(jax.devices(), P("i")))


def columns():
    return jax.device_put(HOST, over(jax.devices(), P(None, "i")))


@pytest.fixture
def no_host_copies(monkeypatch):
    """Makes every copy of a device array to the host an error."""

    def refuse(array):
        raise AssertionError(f"an array of shape {array.shape} went to the host")

    monkeypatch.setattr(type(jnp.zeros(())), "_value", property(refuse))


def check(moved, sharding, value=HOST):
    assert moved.sharding.is_equivalent_to(sharding, moved.ndim)
    assert moved.committed
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


# What stays as it is


def test_an_array_that_lies_right_is_the_same_object():
    array = rows()
    others = [over(jax.devices(), P("k"), "k"), over(jax.devices(), P("i", None))]
    for sharding in others:
        assert place([array], [sharding])[0] is array
        assert place([array], [sharding], uncommitted=True)[0] is array


def test_what_jit_lays_out_is_left_to_it():
    values = [HOST, np.float32(1), 1, 2.0, True, 1j, jnp.zeros(8)]
    sharding = over(jax.devices(), P())
    for value, result in zip(values, place(values, [sharding] * 7), strict=True):
        assert result is value


def test_uncommitted_values_are_laid_out_on_request():
    sharding = over(jax.devices(), P("i"))
    for value in [HOST, jnp.asarray(HOST)]:
        check(place([value], [sharding], uncommitted=True)[0], sharding)


# What is moved


def cases():
    devices = jax.devices()
    cut, other, whole = P("i"), P(None, "i"), P()
    one = SingleDeviceSharding(devices[3])
    return {
        "one to all": (one, over(devices, cut)),
        "one to a copy on each": (one, over(devices, whole)),
        "one to another": (one, SingleDeviceSharding(devices[5])),
        "all to one": (over(devices, cut), one),
        "copies to one": (over(devices, whole), one),
        "copies to pieces": (over(devices, whole), over(devices, cut)),
        "pieces to copies": (over(devices, cut), over(devices, whole)),
        "rows to columns": (over(devices, cut), over(devices, other)),
        "another order": (over(devices, cut), over(devices[::-1], cut)),
        "another order and cut": (over(devices, cut), over(devices[::-1], other)),
        "actors to learners": (over(devices[:4], cut), over(devices[4:], cut)),
        "copies to fewer": (over(devices, whole), over(devices[:2], whole)),
        "pieces to fewer": (over(devices, cut), over(devices[2:6], cut)),
        "pieces to more": (over(devices[:4], cut), over(devices, cut)),
        "overlapping sets": (over(devices[:6], cut), over(devices[3:7], other)),
        "sizes with no common cut": (over(devices[:3], cut), over(devices, other)),
    }


@pytest.mark.parametrize(
    "name",
    ["rows to columns", "pieces to copies", "another order", "actors to learners"],
)
def test_moving_goes_from_device_to_device(name, no_host_copies, monkeypatch):
    source, target = cases()[name]
    array = jax.device_put(HOST, source)
    moved = device_put(array, target)
    moved.block_until_ready()
    monkeypatch.undo()
    check(moved, target)
    check(array, source)


def test_the_guard_against_host_copies_works(no_host_copies):
    with pytest.raises(AssertionError, match="went to the host"):
        np.asarray(rows())


@given(data=st.data())
def test_any_layout_to_any_other(data):
    def layout():
        spec = data.draw(specs(max_devices=8, max_ndim=2, unstacked=False))
        while len(spec.sharding) < 2:
            spec = type(spec)((*spec.sharding, None), spec.mesh_mapping)
        devices = data.draw(st.permutations(jax.devices()))[: spec.num_shards]
        return spec.named_sharding(devices)

    source, target = layout(), layout()
    check(device_put(jax.device_put(HOST, source), target), target)


def test_keys_are_moved():
    keys = jax.random.split(jax.random.key(0), 8)
    array = jax.device_put(keys, over(jax.devices(), P("i")))
    moved = device_put(array, over(jax.devices()[:4], P("i")))
    assert moved.dtype == keys.dtype
    assert len(moved.sharding.device_set) == 4
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


# Donation


@pytest.mark.parametrize("source", [P(), P("i")])
def test_what_a_device_has_already_is_used(source):
    array = jax.device_put(jnp.asarray(HOST) + 0, over(jax.devices()[:4], source))
    target = over(jax.devices()[3:1:-1], P())
    if source == P("i"):
        target = over([jax.devices()[k] for k in (0, 5, 2, 6)], source)
    moved = device_put(array, target)
    check(moved, target)
    held, used = (
        {shard.data.unsafe_buffer_pointer() for shard in each.addressable_shards}
        for each in (array, moved)
    )
    assert len(held & used) == 2
