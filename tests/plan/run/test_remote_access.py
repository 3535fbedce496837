"""What travels to other processes, and what they read and write themselves."""

import pickle
from concurrent.futures import Executor, Future

import jax
import numpy as np
import pytest

from shardmap.planning.plan import plan
from tests.plan.plan_programs import reals
from tests.plan.run.checks import assert_bytes

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
X = reals(64, 8)


class PicklingExecutor(Executor):
    """As an executor of another process, by what goes through the pipe."""

    def __init__(self):
        self.sent = self.back = 0

    def submit(self, *call):
        content = pickle.dumps(call)
        self.sent += len(content)
        function, *args = pickle.loads(content)
        future = Future()
        try:
            result = function(*args)
            self.back += len(pickle.dumps(result))
            future.set_result(result)
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def mapped(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(64, 8))
    x[:] = X
    return x


def scaled(x):
    return x * 2 + 1


def test_a_mapped_file_is_read_and_written_there(mapped, tmp_path):
    big = np.memmap(tmp_path / "big", np.float32, "w+", shape=(2**12, 2**9))
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, big.shape)
    pool = PicklingExecutor()
    shard_plan = plan(scaled, big, in_slices={0: 4})
    shard_plan.run(big, out=out, executor=pool)
    assert (out == 1).all()
    assert pool.sent + pool.back < big.nbytes / 100


def test_what_later_stages_need_is_read_from_where_it_was_written(mapped, tmp_path):
    def fun(x):
        y = jax.numpy.sin(x) * 2
        return y, (y - y.mean(0, keepdims=True)).max(0)

    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, X.shape)
    shard_plan = plan(fun, mapped, in_slices={0: 4})
    here = shard_plan.run(mapped)
    there = shard_plan.run(mapped, out=(out, None), executor=PicklingExecutor())
    assert_bytes(here, there)


def test_an_argument_that_is_returned_is_not_read_from_out(tmp_path):
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, X.shape)
    shard_plan = plan(lambda x: (x, x * 2), X, in_slices={0: 4})
    got = shard_plan.run(X, out=(out, None), executor=PicklingExecutor())
    assert_bytes(got, (X, X * 2))


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:plan.run. shards share chunks of result")
@pytest.mark.parametrize(("pieces", "there"), [(4, True), (16, False), (5, False)])
def test_no_two_shards_write_one_chunk(pieces, there, mapped, tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    out = zarr.create_array(tmp_path / "z", shape=X.shape, chunks=(8, 8), dtype="f4")
    shard_plan = plan(scaled, mapped, in_slices={0: pieces})
    shard_plan.run(mapped, out=out, executor=PicklingExecutor())
    np.testing.assert_allclose(out[:], scaled(X), rtol=1e-6)


def test_a_checkpoint_wants_results_here(mapped, tmp_path):
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, X.shape)
    shard_plan = plan(scaled, mapped, in_slices={0: 4})
    folder = tmp_path / "done"
    shard_plan.run(mapped, out=out, executor=PicklingExecutor(), checkpoint=folder)
    out[:] = 0
    shard_plan.run(mapped, out=out, executor=PicklingExecutor(), checkpoint=folder)
    np.testing.assert_allclose(out, scaled(X), rtol=1e-6)


def test_64_bit_files_are_read_as_they_were_planned(tmp_path):
    x = np.memmap(tmp_path / "x", np.float64, "w+", shape=(8, 2))
    x[:] = 1 + 1e-12
    with pytest.warns(UserWarning, match="float64, computed in float32"):
        shard_plan = plan(scaled, x, in_slices={0: 2})
    assert shard_plan.run(x, executor=PicklingExecutor()).dtype == np.float32
    with jax.enable_x64(True):
        shard_plan = plan(scaled, x, in_slices={0: 2})
        got = shard_plan.run(x, executor=PicklingExecutor())
    np.testing.assert_array_equal(got, scaled(np.asarray(x)))


def test_two_datasets_that_are_one_share_memory(tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    x = zarr.create_array(tmp_path / "z", shape=(8, 2), chunks=(2, 2), dtype="f4")
    same = zarr.open_array(tmp_path / "z", mode="r+")
    x[:] = np.arange(16).reshape(8, 2)
    shard_plan = plan(lambda x: x[::-1] * 1, x, in_slices={0: 4})
    with pytest.raises(ValueError, match=r"result shares memory with args\[0\]"):
        shard_plan.run(x, out=same)
