"""New axes other than the leading one."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap import device_put_replicated, device_put_sharded

VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)
DTYPES = [np.bool_, np.float32, jnp.bfloat16]


def host(value):
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def check(array, value, spec, devices):
    """Its value, where it is, and what each device has."""
    assert (array.shape, array.dtype) == (value.shape, value.dtype)
    assert sm.spec_of(array) == spec
    assert [shard.device for shard in array.addressable_shards] == list(devices)
    for shard in array.addressable_shards:
        held = value[shard.index[: value.ndim]]  # That of keys has one more.
        np.testing.assert_array_equal(host(shard.data), host(held))


def cut(axis, size):
    return lambda ndim: sm.ShardingSpec(
        [sm.Chunked(size) if d == axis else None for d in range(ndim)],
        [sm.ShardedAxis(0)],
    )


@pytest.mark.few(4)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_replicated_along_an_axis(axis, on_device, dtype):
    value = VALUE.astype(dtype)
    devices = jax.devices()[::-1]
    array = device_put_replicated(
        jnp.asarray(value) if on_device else value, devices, axis=axis
    )
    check(array, np.stack([value] * 8, axis), cut(axis % 3, 8)(3), devices)


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_trees_with_arrays_of_several_ranks(axis):
    tree = {"w": VALUE, "b": (jnp.arange(3), np.float32(2)), "n": None}
    if axis != 0:
        tree["b"] = (jnp.arange(3), np.arange(2))
    put = device_put_replicated(tree, jax.devices(), axis=axis)
    assert put["n"] is None
    for made, leaf in zip(jax.tree.leaves(put), jax.tree.leaves(tree), strict=True):
        leaf = np.asarray(jnp.asarray(leaf))
        spec = cut(axis % (leaf.ndim + 1), 8)(leaf.ndim + 1)
        check(made, np.stack([leaf] * 8, axis), spec, jax.devices())
    assert device_put_replicated({}, jax.devices(), axis=1) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_keys(axis):
    keys = jax.random.split(jax.random.key(0), 3)
    array = device_put_replicated(keys, jax.devices(), axis=axis)
    check(array, jnp.stack([keys] * 8, axis), cut(axis, 8)(2), jax.devices())
    array = device_put_sharded([keys] * 8, jax.devices(), axis=axis)
    check(array, jnp.stack([keys] * 8, axis), cut(axis, 8)(2), jax.devices())


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_sharded_along_an_axis(axis):
    devices = jax.devices()[::-2]
    shards = [
        {"a": jax.device_put(VALUE + k, jax.devices()[k]) if k % 2 else VALUE + k}
        for k in range(4)
    ]
    made = device_put_sharded(shards, devices, axis=axis)["a"]
    value = np.stack([VALUE + k for k in range(4)], axis)
    check(made, value, cut(axis % 3, 4)(3), devices)


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_inside_jit_and_grad(axis):
    def put(x):
        return device_put_replicated(x, jax.devices(), axis=axis)

    expected = np.stack([VALUE] * 8, axis)
    np.testing.assert_array_equal(jax.jit(put)(VALUE), expected)
    for x in (VALUE, jnp.asarray(VALUE)):
        np.testing.assert_array_equal(jax.jit(lambda _, x=x: put(x))(0.0), expected)
    grad = jax.grad(lambda x: put(x).sum())(jnp.asarray(VALUE))
    np.testing.assert_array_equal(grad, np.full((2, 3), 8))
    both = jax.jit(lambda x: device_put_sharded([x, x + 1], jax.devices()[:2], axis=2))
    np.testing.assert_array_equal(both(VALUE), np.stack([VALUE, VALUE + 1], 2))


def test_no_stack_on_the_host():
    value = np.ones((1 << 10, 1 << 10), np.float32)
    array = device_put_replicated(value, jax.devices(), axis=1)
    assert array.addressable_shards[3].data.shape == (1 << 10, 1, 1 << 10)
    # JAX may use the memory of the one copy that there is, and takes no other.
    tracemalloc.start()
    jax.block_until_ready(device_put_replicated(value, jax.devices(), axis=1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * value.nbytes


def test_maps_take_them():
    value = device_put_replicated(VALUE, jax.devices(), axis=1)
    f = sm.spmap(lambda x: x * 2, in_axes=1)
    np.testing.assert_array_equal(f(value), np.stack([2 * VALUE] * 8))
    pieces = sm.unstack(value, axis=1)
    assert [piece.device for piece in pieces] == jax.devices()


# Errors


def test_axes_that_are_not_there():
    tree = {"w": VALUE, "b": 1.0}
    message = (
        r"device_put_replicated: x\['b'\] has 0 dimensions, so axis 1 is out of range: "
        "give an axis from -1 to 0"
    )
    with pytest.raises(ValueError, match=message):
        device_put_replicated(tree, jax.devices(), axis=1)
    with pytest.raises(ValueError, match=r"device_put_sharded: shards\[0\] has 2 dim"):
        device_put_sharded([VALUE] * 8, jax.devices(), axis=-4)
