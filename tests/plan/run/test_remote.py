"""What travels to other processes."""

import jax
import numpy as np
import pytest

from shardmap.plan.run import remote

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


def test_wide_types_arrive_as_they_were():
    with jax.enable_x64(True):
        x = np.array([2**40, 1], np.int64)
        blob = remote.exported(jax.jit(lambda x: (x + 1,)), (x,))
    # Not enabled here, as it may not be in a worker.
    [result] = remote.run_exported(blob, (x,))
    assert result.dtype == np.int64
    assert result.tolist() == [2**40 + 1, 2]
