"""What users give for the results, checked before anything runs."""

import collections
import errno
import os
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.run import cut_program
from tests.plan.plan_programs import reals
from tests.plan.run.checks import Recorded

X = reals(64, 8)


def rows(fun, *args):
    return plan(fun, *args, in_slices=({0: 8}, *[None] * (len(args) - 1)))


def shifted(x):
    return jnp.roll(x, 1, 0)


@pytest.mark.parametrize("view", [slice(None), slice(None, None, -1)])
def test_an_argument_is_not_written_to(view):
    x = X.copy()
    with pytest.raises(
        ValueError,
        match=r"result shares memory with args\[0\].*another array, or a copy",
    ):
        rows(jnp.tanh, x).run(x, out=x[view])
    np.testing.assert_array_equal(x, X)


def test_a_file_that_is_read_is_not_written(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    x, out = np.load(path, mmap_mode="r"), np.load(path, mmap_mode="r+")
    with pytest.raises(ValueError, match="result shares memory with args"):
        rows(shifted, x).run(x, out=out)


def test_a_full_disk_is_told_before_a_mapped_file_is_written(tmp_path, monkeypatch):
    def full(file, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "out.npy"
    out = np.lib.format.open_memmap(path, "w+", X.dtype, X.shape)
    shard_plan, x = rows(jnp.tanh, X), Recorded(X)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        message = r"out cannot take 2\.1 KiB of float32.* \(No space.*out\.npy"
        with pytest.raises(OSError, match=message):
            shard_plan.run(x, out=out)
    assert x.reads == []
    shard_plan.run(x, out=out)
    assert os.stat(path).st_blocks * 512 >= out.nbytes
    np.testing.assert_allclose(np.load(path), np.tanh(X), rtol=1e-6)


def test_parts_of_one_array_that_lie_apart_are_none_of_the_same():
    both = np.zeros((64, 16), np.float32)
    both[:, ::2] = X
    rows(shifted, X).run(both[:, ::2], out=both[:, 1::2])
    np.testing.assert_array_equal(both[:, 1::2], np.roll(X, 1, 0))


def test_two_outputs_need_two_arrays():
    shard_plan = rows(lambda x: (x + 1, x + 2), X)
    out = np.zeros_like(X)
    with pytest.raises(ValueError, match=r"result\[0\] and result\[1\] share memory"):
        shard_plan.run(X, out=(out, out))


def test_out_has_the_structure_of_the_result():
    shard_plan = rows(lambda x: {"mean": x.mean(0), "rest": (x, None)}, X)
    mean, rest = np.zeros(8, np.float32), np.zeros_like(X)
    for out in ({"mean": mean, "rest": (rest, None)}, {"mean": mean, "rest": [None]}):
        got = shard_plan.run(X, out=out)
        assert got["mean"] is mean
        assert (got["rest"][0] is rest) == (len(out["rest"]) == 2)
    with pytest.raises(ValueError, match=r"out has .*'other'.* returns .*'mean'"):
        shard_plan.run(X, out={"other": mean, "rest": (rest, None)})


def test_what_cannot_be_written_is_told():
    shard_plan = rows(jnp.tanh, X)
    with pytest.raises(ValueError, match=r"has a jax.Array as out.*give a NumPy array"):
        shard_plan.run(X, out=jnp.zeros(X.shape))
    with pytest.raises(ValueError, match="result has a float as out"):
        shard_plan.run(X, out=1.0)


def test_an_array_of_the_other_byte_order_gets_the_values(tmp_path):
    shard_plan = rows(lambda x: (x.sum(0), x * 2), X)
    want = shard_plan.run(X)
    for options in ({}, {"checkpoint": tmp_path}, {"checkpoint": tmp_path}):
        out = [np.zeros(each.shape, each.dtype.newbyteorder()) for each in want]
        shard_plan.run(X, out=tuple(out), **options)
        np.testing.assert_array_equal(out[0], want[0])
        np.testing.assert_array_equal(out[1], want[1])


def test_a_plan_does_not_run_on_tracers():
    shard_plan = rows(jnp.tanh, X)
    for run, x in ((jax.jit(shard_plan.run), X), (jax.vmap(shard_plan.run), X[None])):
        with pytest.raises(TypeError, match=r"cannot run inside.*use sm.chunked"):
            run(x)


@pytest.mark.parametrize("pieces", [8, 4, 16, 5, (16, 40, 8)])
def test_a_chunk_is_written_once_or_the_run_warns(pieces, tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    out = zarr.create_array(tmp_path / "z", shape=X.shape, chunks=(8, 8), dtype="f4")
    shard_plan = plan(jnp.cosh, X, in_slices={0: pieces})
    written, store = collections.Counter(), type(out.store)
    keep = store.set

    async def counted(self, key, value):
        written[key] += 1
        await keep(self, key, value)

    monkeypatch.setattr(store, "set", counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_plan.run(X, out=out)
    assert len(written) == 8
    told = [
        "plan.run: shards share chunks of result along axis 0: each is read and "
        f"written again {written.total() / 8:.3g} times. Cut at "
        "multiples of 8, or give out and memory to plan"
    ]
    assert [str(each.message) for each in caught] == told * (max(written.values()) > 1)


@pytest.mark.parametrize(
    ("memory", "cut"),
    [("60 kB", {0: 2, 1: 2}), ("30 kB", {0: 2, 1: 3}), ("15 kB", {0: 6, 1: 3})],
)
def test_axes_of_the_result_are_cut_at_its_chunks(memory, cut, tmp_path):
    zarr = pytest.importorskip("zarr", reason="has chunks")
    x = zarr.create_array(
        tmp_path / "x", shape=(48, 12, 24), chunks=(8, 5, 12), dtype="f4"
    )
    out = zarr.create_array(
        tmp_path / "z", shape=(24, 12, 48), chunks=(4, 4, 48), dtype="f4"
    )
    x[:] = reals(*x.shape)
    shard_plan = plan(jnp.transpose, x, memory=memory, out=out)
    pieces = {axis: len(each) for axis, each in shard_plan.out_slices.items()}
    assert pieces == cut
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shard_plan.run() is out
    np.testing.assert_array_equal(out[:], x[:].T)


def rechunked_stores(tmp_path, monkeypatch, chunks=(8, 24), out_chunks=(2, 640)):
    """Two stores, the second with the first's axes turned, and how often each chunk is
    read and written."""
    zarr = pytest.importorskip("zarr", reason="has chunks")
    monkeypatch.setattr(cut_program, "IN_MEMORY", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    x = zarr.create_array(tmp_path / "x", shape=(640, 24), chunks=chunks, dtype="f4")
    out = zarr.create_array(
        tmp_path / "z", shape=(24, 640), chunks=out_chunks, dtype="f4"
    )
    x[:] = reals(*x.shape)
    counts = collections.defaultdict(collections.Counter)
    store = type(out.store)
    get, put = store.get, store.set

    async def counted_get(self, key, *args, **options):
        if self.root.name == "x":
            counts["x"][key] += 1
        return await get(self, key, *args, **options)

    async def counted_set(self, key, value):
        counts[self.root.name][key] += 1
        await put(self, key, value)

    monkeypatch.setattr(store, "get", counted_get)
    monkeypatch.setattr(store, "set", counted_set)
    return x, out, counts


def of_chunks(counts):
    """How often each chunk was read or written, and the number of chunks."""
    often = [count for key, count in counts.items() if key.startswith("c/")]
    return {*often}, len(often)


@pytest.mark.parametrize("executor", [None, 1])
def test_rows_become_columns_by_files(executor, tmp_path, monkeypatch):
    x, out, counts = rechunked_stores(tmp_path, monkeypatch)
    shard_plan = plan(jnp.transpose, x, memory="22 kB", out=out)
    assert [stage.num_shards > 1 for stage in shard_plan.stages] == [True, True]
    assert shard_plan.peak_bytes <= 22_000
    assert f"scratch {tmp_path / 'temporary'}: 60.0 KiB at most" in str(shard_plan)
    assert "together the shards read args[0] once" in str(shard_plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shard_plan.run(executor=executor) is out
    if executor is None:  # Other processes count for themselves.
        assert of_chunks(counts["x"]) == ({1}, 80)
        assert of_chunks(counts["z"]) == ({1}, 12)
    np.testing.assert_array_equal(out[:], x[:].T)
    assert os.listdir(tmp_path / "temporary") == []


def test_as_many_chunks_of_the_result_as_fit_are_one_piece(tmp_path, monkeypatch):
    """The last one has four rows of five, and two of them hold more than two fifths."""
    x, out, _ = rechunked_stores(tmp_path, monkeypatch, out_chunks=(5, 640))
    for memory, pieces in (75_600, 5), (77_000, 3):
        shard_plan = plan(jnp.transpose, x, memory=memory, out=out)
        assert len(shard_plan.stages) == 2
        assert len(shard_plan.out_slices[0]) == pieces


def test_a_function_that_needs_whole_rows_writes_whole_columns(tmp_path, monkeypatch):
    x, out, counts = rechunked_stores(tmp_path, monkeypatch)

    def fun(x):
        return jnp.sort(x, 1).T

    shard_plan = plan(fun, x, memory="22 kB", scratch=tmp_path / "given", out=out)
    shard_plan.run()
    assert of_chunks(counts["x"]) == ({1}, 80)
    assert of_chunks(counts["z"]) == ({1}, 12)
    np.testing.assert_array_equal(out[:], np.sort(x[:], 1).T)
    assert not (tmp_path / "temporary").exists()
    out[:] = 0
    shard_plan.run(task=(0, 1), checkpoint=tmp_path / "job")
    np.testing.assert_array_equal(out[:], np.sort(x[:], 1).T)


def test_an_argument_that_is_the_result_is_rechunked(tmp_path, monkeypatch):
    turned, x, counts = rechunked_stores(tmp_path, monkeypatch, (8, 24), (24, 8))
    zarr = pytest.importorskip("zarr", reason="has chunks")
    out = zarr.create_array(tmp_path / "y", shape=x.shape, chunks=(2, 640), dtype="f4")
    x[:] = turned[:].T
    shard_plan = plan(lambda x: (x, x.sum(0)), x, memory="22 kB", out=(out, None))
    assert shard_plan.run()[0] is out
    assert of_chunks(counts["y"]) == ({1}, 12)
    np.testing.assert_array_equal(out[:], x[:])


def test_a_result_whose_chunks_would_be_written_again_is_rechunked(
    tmp_path, monkeypatch
):
    zarr = pytest.importorskip("zarr", reason="has chunks")
    x, turned, counts = rechunked_stores(tmp_path, monkeypatch, out_chunks=(24, 40))
    y = zarr.create_array(tmp_path / "y", shape=x.shape, chunks=(640, 2), dtype="f4")
    shard_plan = plan(lambda x: (x[::-1] * 2, x.T), x, memory="40 kB", out=(y, turned))
    shard_plan.run()
    assert of_chunks(counts["y"]) == ({1}, 12)
    np.testing.assert_array_equal(y[:], x[:][::-1] * 2)
    np.testing.assert_array_equal(turned[:], x[:].T)


def test_stores_in_memory_may_be_equal():
    zarr = pytest.importorskip("zarr", reason="has stores in memory")
    x, out = (zarr.create_array({}, shape=(8, 6), dtype="f4") for _ in range(2))
    plan(lambda x: x + 1, x, in_slices={0: 2}).run(x, out=out)
    np.testing.assert_array_equal(out[:], x[:] + 1)
    with pytest.raises(ValueError, match=r"result shares memory with args\[0\]"):
        plan(lambda x: x + 1, x, in_slices={0: 2}).run(x, out=zarr.open_array(x.store))


def test_one_pass_stays_where_it_reads_a_chunk_at_most_twice(tmp_path, monkeypatch):
    x, out, counts = rechunked_stores(tmp_path, monkeypatch, (160, 12), (6, 640))
    shard_plan = plan(jnp.transpose, x, memory="70 kB", out=out)
    assert len(shard_plan.stages) == 1
    shard_plan.run()
    assert of_chunks(counts["x"]) == ({2}, 8)
    assert of_chunks(counts["z"]) == ({1}, 4)


def test_cuts_of_the_result_that_are_given_stay(tmp_path, monkeypatch):
    x, out, _ = rechunked_stores(tmp_path, monkeypatch)
    shard_plan = plan(
        jnp.transpose, x, out_slices={0: 12}, memory="22 kB", out=out, in_slices={}
    )
    assert (shard_plan.num_shards, len(shard_plan.stages)) == (12, 1)


def test_too_little_memory_for_a_chunk_of_the_result_is_told(tmp_path, monkeypatch):
    x, out, _ = rechunked_stores(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"memory=8\.8 KiB is too little: .* Pass mem"):
        plan(jnp.transpose, x, memory="9 kB", out=out)
    with pytest.raises(
        ValueError, match=r"cannot write to out: result is float32\[24, 6"
    ):
        plan(jnp.transpose, x, out=x)
