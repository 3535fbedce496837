"""Running plans: every executor gives the same bytes; faults are retried or told."""

import ctypes
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.run.workers import ShardError
from tests import command_line
from tests.plan.checks import assert_same
from tests.plan.run.checks import Recorded, W, X, assert_bytes, columns, read_by_shards


def test_shards_read_their_own_slices_only(shard_plan):
    x = Recorded(X)
    shard_plan.run(x, W)
    rows = [(index[0].start, index[0].stop) for index in x.reads]
    assert rows == [(k, k + 8) for k in range(0, 64, 8)] * 2


def test_a_failure_that_stays_is_told(shard_plan):
    x = Recorded(X, failures=[(16, 1), (16, 2)])
    with pytest.raises(
        ShardError, match=r"shard 2 of stage 0 failed 2 times.* args\[0\]\[16:24.*disk"
    ) as info:
        shard_plan.run(x, W, retries=1, max_in_flight=1)
    assert isinstance(info.value.__cause__, OSError)


def test_out_is_filled_and_returned(shard_plan, want, tmp_path):
    memmap = np.lib.format.open_memmap(
        tmp_path / "out.npy", "w+", shape=(64, 4), dtype=np.float32
    )
    sums = np.full(4, 99, np.float32)
    got = shard_plan.run(X, W, out=(sums, memmap))
    assert got[0] is sums
    assert got[1] is memmap
    assert_same((sums, np.asarray(memmap)), want, 1e-4)


DECODING = """
import sys, tracemalloc
import jax.numpy as jnp, numpy as np, zarr
from shardmap.planning.plan import plan

shape, limit = (1000, 20, 100), 3_000_000
x = zarr.create_array(sys.argv[1], shape=shape, chunks=(200, 4, 100), dtype="f4")
x[...] = np.random.default_rng(0).normal(size=shape)
made = plan(lambda x: jnp.median(x, 0), x, memory=limit)
want = made.run(x)
tracemalloc.start()
got, (_, peak) = made.run(x), tracemalloc.get_traced_memory()
np.testing.assert_array_equal(got, want)
assert max(peak, made.peak_bytes) <= limit, peak
"""


def test_chunks_are_decoded_within_memory(tmp_path):
    """zarr decodes ten chunks at once: twice the memory that was given.

    By one thread of zarr's: each of several may hold what it has decoded until the
    system lets it go on, which is chance.
    """
    pytest.importorskip("zarr")
    done = command_line.python(
        "-c", DECODING, tmp_path, ZARR_THREADING__MAX_WORKERS="1"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["zarr", "h5py"])
def test_arrays_of_other_libraries(shard_plan, want, library, tmp_path):
    module = pytest.importorskip(library)
    if library == "zarr":
        x = module.create_array(tmp_path / "x", shape=X.shape, dtype=X.dtype)
        out = module.create_array(
            tmp_path / "out", shape=(64, 4), chunks=(8, 4), dtype=X.dtype
        )
        x[...] = X
    else:
        file = module.File(tmp_path / "x.h5", "w")
        x = file.create_dataset("x", data=X)
        out = file.create_dataset("out", (64, 4), np.float32)
    planned = plan(columns, x, W, in_slices=({0: 8}, None))
    sums, _ = planned.run(x, W, out=(None, out))
    assert_same((sums, np.asarray(out[...])), want, 1e-4)


def test_one_value_in_two_places(want):
    shard_plan = plan(lambda x: (x * 2, x * 2, x, 7), X, in_slices=({0: 4},))
    out = tuple(np.zeros(X.shape, np.float32) for _ in range(3))
    seven = np.zeros((), np.int32)
    shard_plan.run(X, out=(*out, seven))
    np.testing.assert_array_equal(out[0], X * 2)
    np.testing.assert_array_equal(out[1], X * 2)
    np.testing.assert_array_equal(out[2], X)
    assert seven == 7


def test_numbers_that_are_returned_as_they_are():
    half = np.dtype("bfloat16").type(1.5)
    shard_plan = plan(lambda x: (x * 2, np.float32(3), half), X, in_slices={0: 4})
    twice, three, same = shard_plan.run(X)
    np.testing.assert_array_equal(twice, X * 2)
    assert (three, same, same.dtype) == (3, half, half.dtype)
    assert shard_plan.out_slices[1:] == ({}, {})


def test_bad_outs_are_told_before_anything_runs(shard_plan):
    x = Recorded(X)
    locked = np.zeros((64, 4), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match=r"result\[0\] is float32\[4\], out has .*5\]"):
        shard_plan.run(x, W, out=(np.zeros(5, np.float32), None))
    with pytest.raises(ValueError, match=r"result\[1\] is read-only in out"):
        shard_plan.run(x, W, out=(None, locked))
    with pytest.raises(ValueError, match="max_in_flight must be at least 1, got 0"):
        shard_plan.run(x, W, max_in_flight=0)
    assert x.reads == []


def _die(*args):
    os._exit(1)


@pytest.mark.deep
def test_a_killed_worker_is_told_and_nothing_is_lost(shard_plan, tmp_path):
    pytest.importorskip("flatbuffers")

    class Killer(ProcessPoolExecutor):
        """Kills its worker at the fourth shard."""

        count = 0

        def submit(self, *args):
            self.count += 1
            return super().submit(_die if self.count == 4 else args[0], *args[1:])

    context = multiprocessing.get_context("spawn")
    with (
        Killer(1, mp_context=context) as pool,
        pytest.raises(ShardError, match=r"executor broke down.*checkpoint= keeps"),
    ):
        shard_plan.run(X, W, executor=pool, checkpoint=tmp_path, max_in_flight=1)
    x = Recorded(X)
    got = shard_plan.run(x, W, checkpoint=tmp_path)
    assert len(read_by_shards(x)) == 13
    for a, b in zip(got, shard_plan.run(X, W), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_pool_that_forks_is_refused(shard_plan):
    context = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(1, context) as pool,
        pytest.raises(ValueError, match=r"executor forks this process.*'spawn'"),
    ):
        shard_plan.run(X, W, executor=pool)


def test_a_plan_runs_in_several_threads_at_once(shard_plan):
    want = shard_plan.run(X, W)
    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(lambda _: shard_plan.run(X, W), range(3)):
            assert_bytes(got, want)


def test_one_shard_at_a_time_where_memory_has_no_room_for_two():
    order = []

    class Noted:
        shape, dtype = (64, 8), np.dtype(np.float32)

        def __getitem__(self, index):
            order.append("read")
            return np.ones((64, 8), np.float32)[index]

        def __setitem__(self, index, part):
            time.sleep(0.02)  # Whoever reads ahead has done so by now.
            order.append("written")

    shard_plan = plan(jax.numpy.sin, Noted(), in_slices={0: 6}, memory=1000)
    assert 500 < shard_plan.peak_bytes <= 1000
    shard_plan.run(Noted(), out=Noted())
    assert order == ["read", "written"] * 6


@pytest.mark.parametrize("memory", [None, "1 MB"])
@pytest.mark.parametrize("has_trim", [False, True])
def test_within_memory_what_glibc_keeps_is_given_back(has_trim, memory, monkeypatch):
    calls = []
    library = SimpleNamespace(malloc_trim=calls.append) if has_trim else object()
    shard_plan = plan(
        columns, X, W, **({"memory": memory} if memory else {"in_slices": {}})
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert_same(shard_plan.run(X, W), columns(X, W))
    assert bool(calls) is (has_trim and memory is not None)


def test_a_bar_names_its_stage_and_counts_shards(shard_plan, capsys, monkeypatch):
    pytest.importorskip("tqdm", reason="shows it")
    shard_plan.run(X, W, progress=True)
    shown = capsys.readouterr().err
    assert "stage 1: 100%" in shown
    assert "16/16" in shown
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm: pip install"):
        shard_plan.run(X, W, progress=True)


def test_wrong_options_are_refused(tmp_path):
    shard_plan = plan(lambda x: x + 1, X, in_slices={0: 2})
    file = tmp_path / "file"
    file.touch()
    for options, error, match in (
        ({"retries": -1}, ValueError, "retries must be at least 0, got -1"),
        ({"retries": "a"}, TypeError, "retries must be an integer, got 'a'"),
        (
            {"max_in_flight": "a"},
            TypeError,
            "max_in_flight must be an integer, got 'a'",
        ),
        (
            {"max_in_flight": 2.5},
            TypeError,
            "max_in_flight must be an integer, got 2.5",
        ),
        ({"progress": "a"}, TypeError, "progress must be True or False, got 'a'"),
        (
            {"checkpoint": 3},
            TypeError,
            "checkpoint must be the path of a folder, got 3",
        ),
        (
            {"checkpoint": ""},
            ValueError,
            "checkpoint must be the path of a folder, got",
        ),
        ({"scratch": ""}, ValueError, "scratch must be the path of a folder, got ''"),
    ):
        with pytest.raises(error, match=match):
            shard_plan.run(X, **options)
    with pytest.raises(ValueError, match=r"must be a folder, but .* is a file"):
        shard_plan.run(X, checkpoint=file)
