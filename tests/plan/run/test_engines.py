"""One suite for every engine: the same bytes, from wherever, whatever fails."""

import errno
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardmap as sm
from shardmap.planning.plan import plan
from shardmap.planning.run.workers import ShardError
from shardmap.planning.sources import registry
from shardmap.planning.sources.registry import register_shard_handler
from tests.plan.plan_programs import reals
from tests.plan.run.checks import W, X, assert_bytes

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


def spawned():
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


ENGINES = [
    *("here", "threads", "processes", "dask"),
    pytest.param("loky", marks=pytest.mark.deep),  # As the other pool of processes.
]


@pytest.fixture(params=ENGINES, scope="module")
def engine(request):
    name = request.param
    if name == "here":
        yield SimpleNamespace(name=name, executor=None)
    elif name == "dask":
        client = request.getfixturevalue("dask_client")
        yield SimpleNamespace(name=name, executor=client)
    elif name == "loky":
        loky = pytest.importorskip("loky", reason="the engine under test")
        executor = loky.get_reusable_executor(max_workers=1)
        yield SimpleNamespace(name=name, executor=executor)
        executor.shutdown()
    else:
        with ThreadPoolExecutor(2) if name == "threads" else spawned() as pool:
            yield SimpleNamespace(name=name, executor=pool)


def score(x, w):
    mean = x.mean(0, keepdims=True)
    y = jnp.tanh((x - mean) @ w)
    return y.sum(0), y, (x * x).T @ x, y.max()


@pytest.fixture(scope="module")
def shard_plan():
    return plan(score, X, W, in_slices=({0: 40}, None))


@pytest.fixture(scope="module")
def want(shard_plan):
    return shard_plan.run(X, W)


def mapped(tmp_path, x=X):
    found = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
    found[:] = x
    return found


def stored(tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    found = zarr.create_array(tmp_path / "z", shape=X.shape, chunks=(8, 8), dtype="f4")
    found[:] = X
    return found


def dataset(tmp_path):
    h5py = pytest.importorskip("h5py", reason="writes the file")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
    return h5py.File(tmp_path / "x.h5")["x"]


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", [None, mapped, stored, dataset])
def test_the_same_bytes_from_wherever(engine, source, shard_plan, want, tmp_path):
    x = X if source is None else source(tmp_path)
    assert_bytes(shard_plan.run(x, W, executor=engine.executor), want)


@pytest.mark.few(1)
def test_to_files_and_stores(engine, shard_plan, want, tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    x = mapped(tmp_path)
    fits = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", np.float32, (64, 4))
    total = np.lib.format.open_memmap(tmp_path / "s.npy", "w+", np.float32, (8, 8))
    out = (None, fits, total, None)
    assert_bytes(shard_plan.run(x, W, out=out, executor=engine.executor), want)
    shared = zarr.create_array(tmp_path / "y", shape=(64, 4), chunks=(7, 3), dtype="f4")
    with pytest.warns(UserWarning, match=r"chunks of result\[1\] .* at multiples of 7"):
        shard_plan.run(x, W, out=(None, shared, None, None), executor=engine.executor)
    assert shared[:].tobytes() == want[1].tobytes()


def test_64_bits(engine, tmp_path):
    x = mapped(tmp_path, np.arange(12.0).reshape(6, 2) + 1e-12)
    with jax.enable_x64(True):
        shard_plan = plan(lambda x: (x * 3, x.sum()), x, in_slices={0: 3})
        want = shard_plan.run(np.asarray(x))
        assert want[0].dtype == np.float64
        assert_bytes(shard_plan.run(x, executor=engine.executor), want)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["bfloat16", "int4"])
def test_types_that_numpy_does_not_know(engine, name, tmp_path):
    dtype = np.dtype(name)
    x = mapped(tmp_path, np.arange(-4, 4).astype(dtype).reshape(4, 2))
    shard_plan = plan(lambda x: (x + x, x.max(0)), x, in_slices={0: 2})
    want = shard_plan.run(np.asarray(x))
    assert_bytes(want, (np.asarray(x) + np.asarray(x), np.asarray(x)[-1]))
    y = np.memmap(tmp_path / "y", dtype, "w+", shape=(4, 2))
    m = np.memmap(tmp_path / "m", dtype, "w+", shape=(2,))
    got = shard_plan.run(np.array(x), executor=engine.executor)
    assert [each.dtype for each in got] == [dtype, dtype]
    assert_bytes(got, want)
    assert_bytes(shard_plan.run(x, out=(y, m), executor=engine.executor), want)
    kept = tmp_path / "kept"
    for _ in range(2):
        got = shard_plan.run(x, executor=engine.executor, checkpoint=kept)
        assert_bytes(got, want)


@pytest.mark.few(2)
def test_random_keys(engine):
    key = jax.random.key(3)

    def fun(key, x):
        return x + jax.random.uniform(key, x.shape), jax.random.fold_in(key, 1)

    shard_plan = plan(fun, key, X, in_slices=(None, {0: 4}))
    got, new = shard_plan.run(key, X, executor=engine.executor)
    want, also = shard_plan.run(key, X)
    assert_bytes([got, jax.random.key_data(new)], [want, jax.random.key_data(also)])


@pytest.mark.few(2)
@pytest.mark.parametrize("partitionable", [False, True])
def test_random_bits_are_those_of_the_plan(engine, partitionable, tmp_path):
    key = jax.random.key(3)

    def fun(key, x):
        return x + jax.random.uniform(key, x.shape)

    with jax.threefry_partitionable(partitionable):
        shard_plan = plan(fun, key, X, in_slices=(None, {0: 4}))
        want = jax.jit(fun)(key, X)
        assert_bytes([shard_plan.run(key, X, checkpoint=tmp_path)], [np.asarray(want)])
    for run in (
        shard_plan.run,
        functools.partial(shard_plan.run, executor=engine.executor),
    ):
        assert_bytes([run(key, X)], [np.asarray(want)])
    with jax.threefry_partitionable(not partitionable):
        other = plan(fun, key, X, in_slices=(None, {0: 4}))
    with pytest.raises(ValueError, match="belongs to another plan"):
        other.run(key, X, checkpoint=tmp_path)


class OfTwoArguments(Exception):
    """It pickles, but pickle cannot make it again, as many errors of stores."""

    def __init__(self, code, url):
        super().__init__(f"{code} for {url}")


class Scripted:
    """A file whose readings fail, wait, or kill who reads, as a script says.

    The script is a folder: of each row that it names, the first reading does what it
    says, in whatever process. A checkpoint reads all rows, which always works.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.shape, self.dtype = X.shape, X.dtype

    def __getitem__(self, index):
        scripts = self.folder.glob(f"{index[0].start}-*")
        for script in scripts if index[0] != slice(0, len(X)) else ():
            what = script.name.partition("-")[2]
            if what != "always":
                script.unlink()
            if what == "slow":
                time.sleep(0.5)
            elif what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "exit":
                sys.exit(3)
            elif what == "two":
                raise OfTwoArguments(404, "store/x")
            elif what == "memory":
                raise MemoryError("no room for a shard")
            else:
                raise OSError("the disk is gone")
        return X[index]


def describe(value):
    return {"place": str(value.folder)}


def reopen(about, writable):
    return Scripted(about["place"])


class Full:
    """A file on a disk that is full for one writing, of which half is done."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.array = np.load(self.folder / "y.npy", mmap_mode="r+")
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __getitem__(self, index):
        return self.array[index]

    def __setitem__(self, index, part):
        try:
            (self.folder / "full").unlink()
        except FileNotFoundError:
            self.array[index] = part
            return
        rows = index[0]
        half = (rows.stop - rows.start) // 2
        self.array[rows.start : rows.start + half] = part[:half]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)


def reopen_full(about, writable):
    return Full(about["place"])


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    """Registers what tests write and read for each of them."""
    monkeypatch.setattr(registry, "_openers", dict(registry._openers))
    register_shard_handler(Scripted, describe=describe, reopen=reopen)
    register_shard_handler(
        Full, describe=describe, reopen=reopen_full, grain=lambda value: (1, 1)
    )


@pytest.fixture
def full(tmp_path):
    def make():
        np.save(tmp_path / "y.npy", np.zeros((64, 4), np.float32))
        (tmp_path / "full").touch()
        return Full(tmp_path)

    return make


@pytest.fixture
def scripted(tmp_path):
    def make(*scripts):
        for script in scripts:
            (tmp_path / script).touch()
        return Scripted(tmp_path)

    return make


@pytest.fixture(scope="module")
def eight():
    return plan(score, X, W, in_slices=({0: 8}, None))


@pytest.mark.few(2)
def test_storage_that_fails_once_is_tried_again(engine, eight, scripted):
    x = scripted("16-once", "40-memory")
    want = eight.run(X, W)
    assert_bytes(eight.run(x, W, executor=engine.executor, retries=1), want)
    assert not list(x.folder.iterdir())


def test_storage_that_fails_is_told(engine, eight, scripted):
    x = scripted("24-always")
    with pytest.raises(ShardError, match=r"shard 3 of stage 0 .*the disk is gone"):
        eight.run(x, W, executor=engine.executor, retries=1)
    assert_bytes(eight.run(X, W, executor=engine.executor), eight.run(X, W))


def test_what_cannot_leave_a_worker_is_told_and_tried_again(engine, eight, scripted):
    x = scripted("16-exit", "40-two")
    got = eight.run(x, W, executor=engine.executor, retries=1)
    assert_bytes(got, eight.run(X, W))
    # Both of shard 0: shards behind it may still run when it has failed.
    for script, told in ("0-exit", "SystemExit: 3"), ("0-two", "OfTwo.*: 404 for stor"):
        with pytest.raises(sm.ShardError, match=f"failed; it reads .*{told}") as caught:
            eight.run(scripted(script), W, executor=engine.executor)
        lines = "".join(traceback.format_exception(caught.value))
        assert "in __getitem__" in lines
    assert_bytes(eight.run(X, W, executor=engine.executor), got)


@pytest.mark.few(1)
def test_a_handler_that_cannot_travel_is_named(eight, scripted):
    register_shard_handler(Scripted, describe=describe, reopen=lambda about, _: None)
    with (
        spawned() as pool,
        pytest.raises(TypeError, match=r"cannot import reopen of t"),
    ):
        eight.run(scripted(), W, executor=pool)


@pytest.mark.few(2)
def test_a_disk_that_is_full_for_a_while(engine, eight, scripted, full, tmp_path):
    """The run ends and tells it; the next one, or the next try, has all of it."""
    want = eight.run(X, W)
    x, y = scripted(), full()
    out = (None, y, None, None)
    with pytest.raises((OSError, ShardError), match="No space left on device"):
        eight.run(x, W, out=out, executor=engine.executor)
    assert_bytes(eight.run(x, W, out=out, executor=engine.executor), want)
    y = full()
    out, kept = (None, y, None, None), tmp_path / "kept"
    with pytest.raises((OSError, ShardError), match="No space left on device"):
        eight.run(x, W, out=out, executor=engine.executor, checkpoint=kept)
    done = [int(file.stem.partition("-")[2]) for file in kept.glob("1-*.bin")]
    # What is kept is not read again.
    (tmp_path / f"{8 * min(done)}-always").touch()
    assert_bytes(
        eight.run(x, W, out=out, executor=engine.executor, checkpoint=kept), want
    )
    np.testing.assert_array_equal(y.array, want[1])


def test_workers_try_a_full_disk_again(engine, eight, scripted, full):
    x, out = scripted(), (None, full(), None, None)
    if engine.name in ("here", "threads"):
        # This process writes, which is no shard's work: it tells it at once.
        with pytest.raises(OSError, match="No space left on device"):
            eight.run(x, W, out=out, executor=engine.executor, retries=1)
    got = eight.run(x, W, out=out, executor=engine.executor, retries=1)
    assert_bytes(got, eight.run(X, W))


@pytest.mark.few(1)
def test_a_slow_worker_changes_no_byte(engine, eight, scripted):
    x = scripted("0-slow", "32-slow")
    assert_bytes(eight.run(x, W, executor=engine.executor), eight.run(X, W))


@pytest.mark.deep
def test_a_worker_that_is_killed(eight, scripted, dask_client, tmp_path):
    """A cluster goes on; a pool of processes says what to do."""
    x = scripted("16-kill", "48-kill")
    want = eight.run(X, W)
    assert_bytes(eight.run(x, W, executor=dask_client), want)
    x = scripted("16-kill")
    with spawned() as pool, pytest.raises(ShardError, match="checkpoint= keeps"):
        eight.run(x, W, executor=pool, checkpoint=tmp_path / "done")
    x = scripted("40-kill")
    loky = pytest.importorskip("loky", reason="the engine under test")
    executor = loky.get_reusable_executor(max_workers=1)
    with pytest.raises(ShardError, match="checkpoint= keeps"):
        eight.run(x, W, executor=executor, checkpoint=tmp_path / "done")
    got = eight.run(x, W, executor=1, checkpoint=tmp_path / "done")
    assert_bytes(got, want)


@pytest.mark.few(1)
def test_a_dask_array_is_read_where_it_is(engine, shard_plan, want):
    da = pytest.importorskip("dask.array", reason="the argument under test")
    x = da.from_array(X, chunks=(24, 5))
    assert_bytes(shard_plan.run(x, W, executor=engine.executor), want)


@pytest.mark.few(2)
def test_views_of_one_file(engine, tmp_path):
    x = mapped(tmp_path)
    shard_plan = plan(lambda a, b: a - b, x[:32], x[32:], in_slices=({0: 4}, {0: 4}))
    got = shard_plan.run(x[:32], x[32:], executor=engine.executor)
    np.testing.assert_array_equal(got, X[:32] - X[32:])


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("pieces", [17, 40, 300])
def test_sums_are_one_tree(engine, pieces):
    """Of cells that several boxes have, and of whole ones."""
    x = reals(300, 8)
    shard_plan = plan(
        lambda x: (x.sum(0), (x * 3).max()), x, in_slices={0: pieces, 1: 2}
    )
    assert_bytes(
        shard_plan.run(x, executor=engine.executor, max_in_flight=4), shard_plan.run(x)
    )


@pytest.mark.deep
def test_a_worker_that_is_killed_with_what_it_has_put_together(scripted, dask_client):
    """Only what was not put together here yet is computed again."""
    shard_plan = plan(lambda x: x.sum(0), X, in_slices={0: 64})
    got = shard_plan.run(scripted("56-kill"), executor=dask_client, max_in_flight=4)
    assert got.tobytes() == shard_plan.run(X).tobytes()


def test_what_runs_nothing_is_refused(shard_plan, tmp_path):
    with pytest.raises(TypeError, match=r"executor must be .* got {} of type dict"):
        shard_plan.run(X, W, executor={}, checkpoint=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    with pytest.raises(ValueError, match=r"processes, executor, must be at least 1"):
        shard_plan.run(X, W, executor=np.int64(0))
