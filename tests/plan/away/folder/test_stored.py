"""Numbers that ``.npy`` files do not know are stored as their bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.away.folder.job import Job
from shardmap.plan.away.folder.stored import stored, stored_dtype
from shardmap.plan.away.folder.work import Worker, results
from shardmap.plan.plan import plan


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, np.complex64])
def test_numbers_of_numpy_are_stored_as_they_are(dtype):
    x = np.arange(3).astype(dtype)
    assert stored_dtype(dtype) == x.dtype
    assert stored(x).tobytes() == x.tobytes()


def test_bits_come_back_from_a_file(tmp_path):
    x = np.array([1.5, -0.0, np.inf], jnp.bfloat16)
    np.save(tmp_path / "x.npy", stored(x))
    found = np.load(tmp_path / "x.npy")
    assert found.dtype == np.uint16
    assert found.view(jnp.bfloat16).tobytes() == x.tobytes()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_types_that_numpy_does_not_know(name, tmp_path):
    dtype = np.dtype(name)
    x = np.arange(-4, 4).astype(dtype).reshape(4, 2)
    lying = np.memmap(tmp_path / "x", dtype, "w+", shape=x.shape)
    lying[:] = x
    y = np.memmap(tmp_path / "y", dtype, "w+", shape=x.shape)

    def fun(x, z):
        return x + z, x.max(0), x.max(), dtype.type(1)

    made = plan(fun, lying, x, in_slices={0: 2})
    want = made.run(lying, x)
    for job, out in (("kept", None), ("put", (y, None, None, None))):
        made.save(tmp_path / job, lying, x, out=out)
        Worker(Job(tmp_path / job)).run()
        assert Worker(Job(tmp_path / job)).check() == 0
        for k, value in enumerate(want[out is not None :], out is not None):
            stored = np.load(tmp_path / job / f"out/{k}.npy")
            assert stored.dtype == np.dtype(f"u{dtype.itemsize}")
            np.testing.assert_array_equal(stored.view(dtype), value)
        told = [each.dtype for each in results(Job(tmp_path / job)).values()]
        assert told == [dtype] * 4
    np.testing.assert_array_equal(y, want[0])
