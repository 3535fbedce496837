"""What the tests of partitions share."""

import math

import jax
import numpy as np


def spread(*shape):
    return np.sin(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


def assert_close(got, wanted):
    """Equal structures, dtypes and shapes, and nearly equal values."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def buffers(array):
    return [shard.data.shape for shard in array.addressable_shards]
