"""What travels to other processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.run import remote

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


def test_a_function_travels_as_bytes():
    x = np.arange(4, dtype=np.float32)
    blob = remote.exported(jax.jit(lambda x, k: (jnp.sin(x), k)), (x, np.int32(2)))
    assert isinstance(blob, bytes)
    first, second = remote.run_exported(blob, (x, np.int32(2)))
    np.testing.assert_allclose(first, np.sin(x), rtol=1e-6)
    assert second.dtype == np.int32


def test_wide_types_arrive_as_they_were():
    with jax.enable_x64(True):
        x = np.array([2**40, 1], np.int64)
        blob = remote.exported(jax.jit(lambda x: (x + 1,)), (x,))
    # Not enabled here, as it may not be in a worker.
    [result] = remote.run_exported(blob, (x,))
    assert result.dtype == np.int64
    assert result.tolist() == [2**40 + 1, 2]


def test_a_function_is_read_once():
    blob = remote.exported(jax.jit(lambda x: (x * 3,)), (np.float32(1),))
    before = remote._imported.cache_info().misses
    for _ in range(3):
        remote.run_exported(blob, (np.float32(1),))
    assert remote._imported.cache_info().misses == before + 1
