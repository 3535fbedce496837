"""What lies under xarray's labels: the array itself, or one that is not read yet."""

import pickle

import numpy as np
import pytest

from shardmap.planning.sources import labelled, stores
from shardmap.planning.sources.registry import remote_ref

xarray = pytest.importorskip("xarray")
X = np.arange(24.0).reshape(4, 6)


def test_labels_are_known_by_their_class():
    array = xarray.DataArray(X, dims=("a", "b"))
    dataset = xarray.Dataset({"x": array})
    assert labelled.is_labelled(array)
    assert labelled.is_labelled(dataset)
    assert (labelled.is_dataset(dataset), labelled.is_dataset(array)) == (True, False)
    assert not labelled.is_labelled(X)
    # What is called so elsewhere is not it.
    assert not labelled.is_labelled(type("DataArray", (), {})())


def test_the_arrays_take_the_place_of_what_has_labels():
    array = xarray.DataArray(X, dims=("a", "b"))
    found = labelled.plain([{"one": array, "two": X}, xarray.Dataset({"x": array})])
    assert found[0]["one"] is X
    assert found[0]["two"] is X
    np.testing.assert_array_equal(found[1]["x"], X)


def test_an_array_on_disk_stays_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    array = xarray.DataArray(mapped, dims=("a", "b"))
    assert labelled.plain(array) is mapped
    # A part of what it views is another array.
    part = xarray.DataArray(np.asarray(mapped)[1:], dims=("a", "b"))
    np.testing.assert_array_equal(labelled.plain(part), X[1:])


def test_what_is_not_read_yet_is_read_by_slices(tmp_path):
    pytest.importorskip("zarr")
    # What is in a store is known by the stores' own kind.
    assert stores
    store = tmp_path / "x.zarr"
    dataset = xarray.Dataset({"x": (("a", "b"), X)})
    dataset.to_zarr(store, consolidated=False)
    dataset = xarray.open_zarr(store, chunks=None, consolidated=False)
    lazy = labelled.plain(dataset["x"][1:])
    assert isinstance(lazy, labelled.Lazy)
    assert (lazy.shape, lazy.dtype) == ((3, 6), X.dtype)
    np.testing.assert_array_equal(lazy[1:, ::2], X[2:, ::2])
    assert_opened_elsewhere(lazy, X[1:])


def assert_opened_elsewhere(lazy, values):
    opened = pickle.loads(pickle.dumps(remote_ref(lazy))).open()
    assert isinstance(opened, labelled.Lazy)
    np.testing.assert_array_equal(opened[:], values)


def test_a_store_that_is_decoded_and_other_files_are_opened_elsewhere(tmp_path):
    pytest.importorskip("zarr")
    pytest.importorskip("scipy", reason="reads the file")
    dataset = xarray.Dataset({"x": (("a", "b"), X)})
    packed = {"x": {"scale_factor": 0.5}}
    dataset.to_zarr(tmp_path / "x.zarr", consolidated=False, encoding=packed)
    dataset.to_netcdf(tmp_path / "x.nc", engine="scipy", encoding=packed)
    for stored in (
        xarray.open_zarr(tmp_path / "x.zarr", chunks=None, consolidated=False),
        xarray.open_dataset(tmp_path / "x.nc", engine="scipy"),
    ):
        assert_opened_elsewhere(labelled.plain(stored["x"][::-1, 2:]), X[::-1, 2:])
        stored.close()


def test_what_is_in_memory_below_is_not_sent_as_a_whole():
    zarr = pytest.importorskip("zarr")
    store = zarr.storage.MemoryStore()
    xarray.Dataset({"x": (("a", "b"), X)}).to_zarr(store, consolidated=False)
    stored = xarray.open_zarr(store, chunks=None, consolidated=False)
    assert remote_ref(labelled.plain(stored["x"])) is None
    decoded = xarray.decode_cf(
        xarray.Dataset({"x": (("a", "b"), X, {"scale_factor": 2.0})})
    )
    lazy = labelled.plain(decoded["x"])
    assert remote_ref(lazy) is None
    np.testing.assert_array_equal(lazy[:, 1:], 2 * X[:, 1:])
