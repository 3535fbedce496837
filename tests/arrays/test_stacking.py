"""One shard for each device: values, layouts, memory, and what clients look at."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap import device_put_replicated, device_put_sharded, unstack
from shardmap.arrays.placement import place


def check(array, value, devices):
    """One shard of length 1 for each device, in order, in a mesh of one axis."""
    assert isinstance(array.sharding, NamedSharding)
    assert array.sharding.mesh.axis_names == (array.sharding.spec[0],)
    assert list(array.sharding.mesh.devices.flat) == list(devices)
    assert array.shape == np.shape(value)
    assert len(array.addressable_shards) == len(devices)
    for k, device in enumerate(devices):
        shard = array.addressable_shards[k]
        assert shard.device == device
        np.testing.assert_array_equal(shard.data, np.asarray(value)[k : k + 1])


def on(number, value):
    return jax.device_put(value, jax.devices()[number])


# device_put_sharded: the cases of the old tests first


def test_sharded_trees():
    devices = jax.local_devices()
    shards = [(i, np.arange(i, i + 4)) for i in range(8)]
    numbers, arrays = device_put_sharded(shards, devices)
    check(numbers, np.arange(8), devices)
    check(arrays, np.stack([x for _, x in shards]), devices)


@pytest.mark.parametrize("order", [[0], [3, 1], [7, 6, 5, 4, 3, 2, 1, 0]])
def test_sharded_over_some_devices_in_their_order(order):
    devices = [jax.devices()[k] for k in order]
    shards = [np.full((2, 3), k, np.float32) for k in order]
    check(device_put_sharded(shards, devices), np.stack(shards), devices)


def test_shards_from_anywhere():
    devices = jax.devices()[:5]
    cut = NamedSharding(Mesh(np.array(jax.devices()[4:]), "i"), P("i"))
    value = np.arange(4, dtype=np.float32)
    shards = [
        value,
        on(1, value + 1),
        on(7, value + 2),
        jax.device_put(value + 3, cut),
        jnp.asarray(value + 4),
    ]
    check(
        device_put_sharded(shards, devices),
        np.stack([value + k for k in range(5)]),
        devices,
    )


def test_pieces_that_are_not_committed_stay_on_their_devices():
    devices = jax.devices()
    array = device_put_sharded([np.full(2, k) for k in range(8)], devices)
    again = device_put_sharded(unstack(array), devices)
    check(again, np.asarray(array), devices)


# device_put_replicated


def test_replicated_trees():
    devices = jax.local_devices()
    tree = {"a": np.array([1, 2, 3, 4]), "b": jnp.arange(3), "none": None, "c": 2.5}
    put = device_put_replicated(tree, devices)
    check(put["a"], np.tile([1, 2, 3, 4], (8, 1)), devices)
    check(put["b"], np.tile([0, 1, 2], (8, 1)), devices)
    check(put["c"], np.full(8, 2.5), devices)
    assert put["none"] is None
    assert device_put_replicated({}, devices) == {}


@pytest.mark.parametrize("source", ["uncommitted", "one", "rows", "copies"])
def test_replicated_from_devices(source):
    devices = jax.devices()[5:1:-1]
    value = np.arange(8, dtype=np.float32)
    mesh = Mesh(np.array(jax.devices()), "i")
    array = {
        "uncommitted": jnp.asarray(value),
        "one": on(6, value),
        "rows": jax.device_put(value, NamedSharding(mesh, P("i"))),
        "copies": jax.device_put(value, NamedSharding(mesh, P())),
    }[source]
    check(device_put_replicated(array, devices), np.tile(value, (4, 1)), devices)
    np.testing.assert_array_equal(array, value)


def host_peak(make, value):
    """The most host memory that NumPy held at a time, in copies of the value."""
    tracemalloc.start()
    jax.block_until_ready(make())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / value.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_host_memory(dtype):
    """Narrowing to float32 takes half a copy; the rows themselves take none."""
    devices = jax.devices()
    value = np.ones(1 << 20, dtype)
    narrowed = 0.5 if dtype == np.float64 else 0
    peak = host_peak(lambda: device_put_replicated(value, devices), value)
    assert peak < narrowed + 0.1
    stacked = host_peak(lambda: jnp.asarray(np.stack([value] * 8)), value)
    assert stacked > 7.9
    shards = [value[k::8] for k in range(8)]
    assert host_peak(lambda: device_put_sharded(shards, devices), value) < 1.1


def test_dtypes_are_narrowed_as_jax_does():
    devices = jax.devices()[:2]
    assert device_put_replicated(np.ones(2), devices).dtype == np.float32
    assert device_put_replicated(1, devices).dtype == np.int32
    assert device_put_sharded([1.0, 2.0], devices).dtype == np.float32
    with jax.enable_x64(True):
        assert device_put_replicated(np.ones(2), devices).dtype == np.float64


# What is done with the results


@pytest.mark.parametrize(
    "make",
    [
        lambda x, devices: device_put_replicated(x, devices),
        lambda x, devices: device_put_sharded([x] * len(devices), devices),
    ],
    ids=["replicated", "sharded"],
)
class TestResults:
    def test_maps_take_them_without_a_copy(self, make):
        # NumPy's memory, which JAX may use as it is, would not be given to results.
        array = make(jnp.arange(4.0), jax.devices())
        f = sm.spmap(lambda x: x + 1, donate_argnums=0)
        (sharding,) = jax.tree.leaves(
            [spec.named_sharding(jax.devices()) for spec in f.lower(array).in_specs]
        )
        assert place([array], [sharding], uncommitted=True)[0] is array
        before = [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]
        result = f(array)
        after = [s.data.unsafe_buffer_pointer() for s in result.addressable_shards]
        assert after == before
        assert array.is_deleted()
        np.testing.assert_array_equal(result, np.tile([1, 2, 3, 4], (8, 1)))

    def test_inside_jit(self, make):
        f = jax.jit(lambda x: make({"x": x, "one": 1.0}, jax.devices()))
        result = f(jnp.arange(3.0))
        np.testing.assert_array_equal(result["x"], np.tile([0, 1, 2], (8, 1)))
        np.testing.assert_array_equal(result["one"], np.ones(8))
        grad = jax.grad(lambda x: make(x, jax.devices()).sum())(jnp.arange(3.0))
        np.testing.assert_array_equal(grad, [8, 8, 8])


# Errors


def test_lengths():
    with pytest.raises(ValueError, match=r"len\(shards\) is 3, len\(devices\) is 8\."):
        device_put_sharded([1, 2, 3], jax.devices())
    with pytest.raises(ValueError, match="device_put_sharded needs at least one dev"):
        device_put_sharded([], [])
    with pytest.raises(ValueError, match="device_put_replicated needs at least one"):
        device_put_replicated(1, [])


def test_shards_that_are_no_sequence():
    with pytest.raises(TypeError, match=r"a sequence with a shard .* got <class '"):
        device_put_sharded(np.ones((8, 2)), jax.devices())


def test_devices_that_are_there_twice():
    devices = [jax.devices()[k] for k in (0, 3, 3)]
    with pytest.raises(ValueError, match=r"device 3 is there more than once in \[0, 3"):
        device_put_sharded([1, 2, 3], devices)
    with pytest.raises(ValueError, match="device_put_replicated needs different dev"):
        device_put_replicated(1, devices)


def test_shapes_and_dtypes_that_differ():
    good = {"w": np.zeros((2, 3)), "b": (np.zeros(2), 1)}
    bad = {"w": np.zeros((2, 4)), "b": (np.zeros(2, int), 1)}
    message = (
        r"needs shards of equal shapes and dtypes: shards\[1\]\['b'\]\[0\] is "
        r"int32\[2\], but in shards\[0\] it is float32\[2\]\.$"
    )
    with pytest.raises(ValueError, match=message):
        device_put_sharded([good, bad, good], jax.devices()[:3])


def test_structures_that_differ():
    message = (
        r"shards of equal structure: shards\[0\] is PyTreeDef\({'a': \*, 'b': \*}\), "
        r"but shards\[2\] is PyTreeDef\({'a': \*, 'c': \*}\)\.$"
    )
    shards = [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "c": 2}]
    with pytest.raises(ValueError, match=message):
        device_put_sharded(shards, jax.devices()[:3])
    with pytest.raises(ValueError, match=r"shards\[1\] is PyTreeDef\(\(\*, \*\)\)\.$"):
        device_put_sharded([[1, 2], (1, 2)], jax.devices()[:2])


def test_what_is_no_array():
    with pytest.raises(
        TypeError, match=r"shards\[0\] is 'text', which is not an array"
    ):
        device_put_sharded(["text", 1], jax.devices()[:2])
    with pytest.raises(TypeError, match=r"x\['a'\] is 'text', which is not an array"):
        device_put_replicated({"a": "text"}, jax.devices())
