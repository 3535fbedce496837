"""The arrays in xarray arrays and datasets, without their labels.

A `DataArray` is one array, a `Dataset` a dict of arrays by name. Values that xarray has
not read yet stay where they are: a shard reads its own part, in any process.
"""

import importlib
import pickle
from typing import Any

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import is_labelled
from shardmap.planning.sources.registry import (
    Description,
    Opener,
    pickled,
    register_opener,
    remote_ref,
    type_name,
    unpickled,
)


def is_dataset(value: object) -> bool:
    return is_labelled(value) and hasattr(value, "data_vars")


def plain(tree: PyTree) -> PyTree:
    """A pytree with the arrays of xarray values in place of these."""
    return jax.tree.map(
        lambda leaf: _plain(leaf) if is_labelled(leaf) else leaf,
        tree,
        is_leaf=is_labelled,
    )


def _plain(value: Any) -> Any:
    if is_dataset(value):
        return {str(k): array_of(v.variable) for k, v in value.data_vars.items()}
    return array_of(value.variable)


def array_of(variable: Any) -> Any:
    """The value of a variable: an array, or an array-like that is not read yet."""
    if variable.chunks is not None:
        return variable.data
    if not variable._in_memory:
        return Lazy(variable)
    values = variable.values
    base = values.base
    if isinstance(base, np.memmap) and base.dtype == values.dtype:
        here, there = values.__array_interface__, base.__array_interface__
        if all(here[k] == there[k] for k in ("data", "shape", "strides")):
            return base
    return values


class Lazy:
    """A variable that xarray has not read yet."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.shape, self.dtype = tuple(variable.shape), variable.dtype
        self.chunks = _chunks_of(variable)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self.variable[index].values)

    @property
    def backend(self) -> Any:
        """What xarray reads from: an array of its backend, or one in memory."""
        data = self.variable._data
        while (inner := getattr(data, "array", None)) is not None:
            data = inner
        return data

    @property
    def stored(self) -> Any:
        """The array of zarr, or another library, that the backend reads."""
        return getattr(self.backend, "_array", None)


def _chunks_of(variable: Any) -> tuple[tuple[int, ...], ...] | None:
    """The lengths of the chunks of a store along each axis, as far as a part has them.

    Returns:
      None if it does not lie in chunks, or every other element of them is taken.
    """
    lengths = variable.encoding.get("preferred_chunks") or {}
    starts, data = [0] * variable.ndim, variable._data
    while (inner := getattr(data, "array", None)) is not None:
        key = getattr(getattr(data, "key", None), "tuple", None)
        if key is not None:
            if not all(isinstance(k, slice) and k.step in (None, 1) for k in key):
                return None
            starts = [a + (k.start or 0) for a, k in zip(starts, key, strict=True)]
        data = inner
    chunks = []
    for dim, start, size in zip(variable.dims, starts, variable.shape, strict=True):
        length = lengths.get(dim)
        if not isinstance(length, int):
            return None
        ends = range(length - start % length, size, length)
        chunks.append(tuple(np.diff([0, *ends, size]).tolist()))
    return tuple(chunks)


def _describe(lazy: Lazy) -> Description | None:
    data = lazy.backend
    # What is in memory would travel as a whole.
    if not isinstance(data, importlib.import_module("xarray").backends.BackendArray):
        return None
    if lazy.stored is not None and remote_ref(lazy.stored) is None:
        return None
    try:
        return pickled(None, lazy)
    except (AttributeError, TypeError, pickle.PicklingError):
        return None


register_opener(type_name(Lazy), Opener("xarray", _describe, unpickled))
