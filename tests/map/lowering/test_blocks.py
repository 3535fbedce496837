"""Axes longer than the devices: where elements go, memory, and what soft_pmap did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import shardmap as sm
from shardmap.compat import soft_pmap

N = 32  # Four for each of eight devices, as in JAX's own tests of soft_pmap.


def devices_and_blocks(result):
    return [(s.device.id, s.data.shape[0]) for s in result.addressable_shards]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, [1] * 3),
        (8, [1] * 8),
        (12, [2] * 6),
        (16, [2] * 8),
        (1000, [125] * 8),
    ],
)
def test_elements_lie_in_blocks_on_as_few_devices_as_need_be(size, expected):
    result = sm.spmap(lambda x: x + 1)(np.arange(size))
    assert devices_and_blocks(result) == list(enumerate(expected))
    np.testing.assert_array_equal(result, np.arange(size) + 1)


@pytest.mark.parametrize("size", [7, 9, 1009])
def test_a_length_that_does_not_divide_gives_a_result_on_every_device(size):
    x = np.arange(size, dtype=np.float32)
    result = sm.spmap(lambda x: x * 2)(x)
    np.testing.assert_array_equal(result, x * 2)
    if size > 8:
        assert result.sharding.is_fully_replicated


def test_a_million_elements_and_three():
    x = np.arange(1_000_003, dtype=np.int32)
    result = sm.spmap(lambda x: x - lax.pmax(x, "i"), "i")(x)
    np.testing.assert_array_equal(result, x - 1_000_002)


def test_input_and_output_stay_where_they_are():
    mapped = sm.spmap(lambda x: x + 1, donate_argnums=0)
    x = mapped(np.zeros((N, 3), np.float32))
    pointers = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    assert x.sharding.spec == PartitionSpec("axis0")
    y = mapped(x)
    assert [s.data.unsafe_buffer_pointer() for s in y.addressable_shards] == pointers
    assert x.is_deleted()


def test_specs_tell_the_blocks():
    lowered = sm.spmap(lambda x: x).lower(np.zeros((N, 3)))
    assert lowered.in_specs[0] == sm.ShardingSpec(
        (sm.Chunked(8), None), (sm.ShardedAxis(0),)
    )
    assert lowered.in_specs[0].shard_shape((N, 3)) == (4, 3)


# batch_size bounds memory


def temporaries(batch_size, size=256, width=4096):
    def body(x):
        product = jnp.outer(x[:64], x[64:128])
        return (product @ jnp.sin(product)).sum()

    mapped = sm.spmap(body, batch_size=batch_size, devices=jax.devices()[:1])
    lowered = mapped.lower(jax.ShapeDtypeStruct((size, width), np.float32))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_batch_size_bounds_the_memory():
    whole, sixteen, four = (temporaries(batch_size) for batch_size in (None, 16, 4))
    assert sixteen < whole / 10
    assert four < sixteen / 3


def test_batch_size_1_takes_one_branch_of_a_cond():
    taken = []

    def body(x):
        def note(name):
            jax.debug.callback(lambda v: taken.append((name, int(v))), x)
            return x

        return lax.cond(x % 2 == 0, lambda: note("even"), lambda: note("odd"))

    sm.spmap(body, batch_size=1)(np.arange(16))
    jax.effects_barrier()
    assert sorted(taken) == sorted(("odd" if k % 2 else "even", k) for k in range(16))


def test_batch_size_1_does_not_make_one_element_wait_for_another():
    """A vectorised while loop runs as often as its slowest element needs."""
    steps = []

    def body(x):
        def note(c):
            jax.debug.callback(lambda v: steps.append(int(v)), x)
            return c + 1

        return lax.while_loop(lambda c: c < x, note, 0)

    x = np.arange(16, dtype=np.int32)
    np.testing.assert_array_equal(sm.spmap(body, batch_size=1)(x), x)
    jax.effects_barrier()
    assert sorted(steps) == sorted(k for k in range(16) for _ in range(k))


# What JAX's tests of soft_pmap and gmap asserted


def test_soft_device_persistence():
    x = np.arange(N * 6.0, dtype=np.float32).reshape(N, 2, 3)
    identity = soft_pmap(lambda x: x)
    once = identity(x)
    with jax.transfer_guard("disallow"):
        twice = identity(once)
    np.testing.assert_array_equal(twice, x)
    assert once.sharding == twice.sharding
    collected = identity(once.reshape(N // 2, 2, 2, 3) + 1)
    np.testing.assert_array_equal(collected, x.reshape(N // 2, 2, 2, 3) + 1)
