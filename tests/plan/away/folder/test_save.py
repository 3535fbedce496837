"""What is saved of a plan: its arguments, constants, keys and places for results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.away.folder.job import Job, JobError
from shardmap.plan.away.folder.work import Worker
from shardmap.plan.plan import plan
from tests.plan.away.folder.checks import W, X, assert_made

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


def test_arguments_are_those_of_the_plan(made, x, tmp_path):
    made.save(tmp_path / "job")
    Worker(Job(tmp_path / "job")).run()
    assert_made(tmp_path / "job", made.run(x, W))


def test_sinks_of_the_user(made, x, tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    stores = [
        zarr.create_array(tmp_path / name, shape=(64, 4), chunks=(c, 4), dtype="f4")
        for name, c in (("fits", 8), ("shared", 12))
    ]
    total = np.lib.format.open_memmap(tmp_path / "sum.npy", "w+", np.float32, (4,))
    want = made.run(x, W)
    for k, store in enumerate(stores):
        job = tmp_path / f"job{k}"
        out = {"max": None, "rows": store, "same": None, "sum": total}
        made.save(job, x, W, out=out)
        Worker(Job(job)).run()
        assert store[:].tobytes() == want["rows"].tobytes()
        assert total.tobytes() == want["sum"].tobytes()
        assert Worker(Job(job)).check() == 0


def test_keys_constants_and_halves(tmp_path):
    table = np.arange(64, dtype=np.float32).reshape(8, 8)

    def fun(key, x):
        half = x.astype(jnp.bfloat16)
        noise = jax.random.uniform(key, x.shape)
        return half, (x + noise + table).sum(0), jax.random.fold_in(key, 1), 3.0

    key = jax.random.key(1)
    made = plan(fun, key, X[:8], in_slices=(None, {0: 4}))
    want = made.run(key, X[:8])
    made.save(tmp_path, key, X[:8])
    job = Job(tmp_path)
    Worker(job).run()
    assert np.load(tmp_path / "out/0.npy").tobytes() == want[0].tobytes()
    assert np.load(tmp_path / "out/1.npy").tobytes() == want[1].tobytes()
    data = np.asarray(jax.random.key_data(want[2]))
    assert np.load(tmp_path / "out/2.npy").tobytes() == data.tobytes()
    assert np.load(tmp_path / "out/3.npy") == 3.0


def test_what_cannot_be_saved(made, x, tmp_path):
    made.save(tmp_path / "job", x, W)
    with pytest.raises(ValueError, match="is a job already: give an empty folder"):
        made.save(tmp_path / "job", x, W)
    with pytest.raises(ValueError, match=r"tasks must be at least 1, got 0"):
        made.save(tmp_path / "other", x, W, tasks=0)
    out = {"max": None, "rows": np.zeros((64, 4), "f4"), "same": None, "sum": None}
    with pytest.raises(ValueError, match=r"result\['rows'\] .* is a ndarray that they"):
        made.save(tmp_path / "other", x, W, out=out)
    twice = plan(lambda x: x * 2, x, in_slices={0: 4})
    with pytest.raises(ValueError, match=r"cannot write result over what is read"):
        twice.save(tmp_path / "other", x, out=x)
    with pytest.raises(JobError, match=r"other is no job: made.save"):
        Job(tmp_path / "other")
