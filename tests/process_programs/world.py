"""What the checks share: where this process is, and arrays that all can work out."""

import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

jax.distributed.initialize(initialization_timeout=300)

PROCESS, PROCESSES = jax.process_index(), jax.process_count()
LOCAL, DEVICES = jax.local_device_count(), jax.device_count()


def numbers(per_process, *shape, seed=0):
    """An array over all processes, and the part of this one."""
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((PROCESSES * per_process, *shape), np.float32)
    return whole, own(whole)


def own(whole, axis=0):
    return np.split(whole, PROCESSES, axis)[PROCESS]


def on_all_devices(whole, *spec):
    mesh = sm.make_mesh({"i": DEVICES}, jax.devices())
    sharding = NamedSharding(mesh, P(*(spec or "i")))
    return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])


def on_own_devices(x):
    """In buffers that XLA has made."""
    return sm.spmap(lambda x: x + 0, devices=jax.local_devices())(x)


def equal(one, other):
    np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=1e-5)


def equal_global(array, expected):
    assert not array.is_fully_addressable
    assert array.shape == expected.shape
    for shard in array.addressable_shards:
        equal(shard.data, expected[shard.index])


def pointers(array):
    return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def refused(kind, text, fun, *args):
    with pytest.raises(kind, match=re.escape(text)):
        fun(*args)


def centered(x):
    return x - lax.pmean(x, "i")
