"""What lies under xarray's labels: the array itself, a lazy one, or a part of it."""

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
    # Another process opens the store, and takes the part.
    found = remote_ref(lazy)
    reopened = found.reopen(found.description, False)
    np.testing.assert_array_equal(reopened[...], X[1:])


@pytest.mark.parametrize("slices", [np.s_[1:, :], np.s_[1:4:2, 2:5], np.s_[3:3, ::3]])
@pytest.mark.parametrize("index", [np.s_[...], np.s_[:2, 1:], np.s_[1:, ::2]])
def test_a_slice_of_a_view_is_one_of_what_it_views(slices, index):
    view = labelled.View(X, slices)
    assert (view.shape, view.dtype) == (X[slices].shape, X.dtype)
    np.testing.assert_array_equal(view[index], X[slices][index])
