"""Datasets and arrays of stores travel as where they lie."""

import os
import pickle

import numpy as np
import pytest

# It registers the types that these tests open.
from shardmap.planning.sources import labelled, stores
from shardmap.planning.sources.registry import remote_ref


def again(sent, writable=False):
    return pickle.loads(pickle.dumps(sent)).open(writable)


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py", reason="writes the file")


@pytest.fixture
def zarr():
    return pytest.importorskip("zarr", reason="writes the store")


def test_a_dataset_that_is_read(h5py, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["g/x"] = np.arange(6.0)
        # Nobody else can open the file meanwhile.
        assert remote_ref(file["g/x"]) is None
    with h5py.File(tmp_path / "x.h5") as file:
        sent = remote_ref(file["g/x"])
        dataset = again(sent)
        assert (dataset.shape, dataset.dtype) == ((6,), np.float64)
        np.testing.assert_array_equal(dataset[1:3], [1.0, 2.0])
        assert sent.grain is None
    # It is open only while it is read.
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["g/x"][2] = 9
    assert dataset[2] == 9


def test_an_array_of_a_folder(zarr, tmp_path):
    array = zarr.create_array(
        tmp_path / "z", name="g/x", shape=(10, 4), chunks=(3, 4), dtype="f4"
    )
    array[:] = 3
    sent = remote_ref(array)
    assert sent.grain == (3, 4)
    np.testing.assert_array_equal(again(sent)[2:4], np.full((2, 4), 3))
    again(sent, writable=True)[1] = 9
    assert (array[1] == 9).all()
    assert remote_ref(zarr.open_array(tmp_path / "z/g/x", mode="r")).grain is None


def test_a_path_is_that_of_the_folder_here(zarr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array("z", shape=(4,), chunks=(2,), dtype="f4")[:] = 3
    sent = remote_ref(zarr.open_array("z"))
    assert sent.place == remote_ref(zarr.open_array(tmp_path / "z")).place
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    np.testing.assert_array_equal(again(sent)[:], [3] * 4)


def test_shards_of_a_store_are_written_whole(zarr, tmp_path):
    array = zarr.create_array(
        tmp_path / "z", shape=(12, 4), chunks=(3, 4), shards=(6, 4), dtype="f4"
    )
    assert remote_ref(array).grain == (6, 4)


def test_a_store_of_fsspec(zarr, tmp_path):
    local = pytest.importorskip("fsspec.implementations.local")
    wrapper = pytest.importorskip("fsspec.implementations.asyn_wrapper")
    system = wrapper.AsyncFileSystemWrapper(
        local.LocalFileSystem(auto_mkdir=True), asynchronous=True
    )
    store = zarr.storage.FsspecStore(system, path=str(tmp_path / "z"))
    array = zarr.create_array(
        store, name="x", shape=(10, 4), chunks=(3, 4), dtype="f4", fill_value=3
    )
    sent = remote_ref(array)
    again(sent, writable=True)[1] = 9
    np.testing.assert_array_equal(again(sent)[:2], [[3] * 4, [9] * 4])
    assert (array[1] == 9).all()


def test_what_is_in_memory_stays(zarr):
    assert remote_ref(zarr.zeros((2, 3))) is None
    pytest.importorskip("fsspec", reason="has the store")
    store = zarr.storage.FsspecStore.from_url("memory://sources")
    array = zarr.create_array(store, shape=(4,), chunks=(2,), dtype="f4")
    assert remote_ref(array) is None


@pytest.mark.parametrize("cores", [2, 64])
def test_files_are_decoded_by_as_many_threads_as_there_are_cores(
    cores, zarr, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    xarray = pytest.importorskip("xarray", reason="reads the store")
    values = xarray.DataArray(np.zeros((40, 8), np.float32), dims=("t", "y"), name="x")
    encoding = {"x": {"chunks": (10, 8)}}
    values.to_dataset().to_zarr(tmp_path / "z", encoding=encoding, consolidated=False)
    opened = xarray.open_zarr(tmp_path / "z", chunks=None, consolidated=False)["x"]
    lazy, usual = labelled.Lazy(opened.variable), zarr.config.get("async.concurrency")
    assert stores.decoded_bytes(lazy) == 2 * 10 * 8 * 4
    for array, most in ((lazy, cores), (zarr.zeros((40, 8)), usual)):
        decoded = stores.decoded_bytes(array)
        for room, fits in ((4 * decoded, 3), (1000 * decoded, 999), (0, 1)):
            with stores.decoding_within([array], room, 0):
                at_once = zarr.config.get("async.concurrency")
                parts = [array[(slice(k, 31 + k),)] for k in range(4)]
                assert all(part.ctypes.data % 64 == 0 for part in parts)
            assert at_once == min(fits, most, usual)
    with stores.decoding_within([np.zeros(3)], 0, 0):
        assert zarr.config.get("async.concurrency") == usual
