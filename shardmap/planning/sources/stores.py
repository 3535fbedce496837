"""Mapped files, datasets of h5py, arrays of zarr in any store, and their chunks."""

import contextlib
import ctypes
import functools
import importlib
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from shardmap.planning.sources.registry import (
    Description,
    Opener,
    pickled,
    register_opener,
    unpickled,
)

ALIGNMENT = 64
"""XLA for CPU copies arrays that do not begin at multiples of so many bytes."""


def _describe_memmap(array: np.memmap[Any, Any]) -> Description | None:
    filename, memory = array.filename, getattr(array, "_mmap", None)
    # Changes of a copy are in this process only, and a file may be gone by now.
    if filename is None or memory is None or array.mode == "c" or array.dtype.hasobject:
        return None
    path = os.path.realpath(filename)
    if not os.path.isfile(path):
        return None
    if array.mode != "r":
        array.flush()
    # A view keeps the offset of the whole, so that its own is where its memory is.
    base = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return {
        "place": path,
        "dtype": array.dtype,
        "shape": array.shape,
        "strides": array.strides,
        "offset": base + array.__array_interface__["data"][0] - start,
    }


def _reopen_memmap(description: Description, writable: bool) -> Any:
    place, offset = description["place"], description["offset"]
    shape, strides = description["shape"], description["strides"]
    dtype = description["dtype"]
    spans = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    first = offset + sum(min(span, 0) for span in spans)
    last = offset + sum(max(span, 0) for span in spans) + dtype.itemsize
    length = os.path.getsize(place)
    if last > length:
        raise ValueError(
            f"{place} has {length:,} bytes, of which an array needs those up "
            f"to {last:,}: it was cut short, or is another file here"
        )
    mode: Any = "r+" if writable else "r"
    content: Any = np.memmap(place, np.uint8, mode, first, (last - first,))
    view: Any = np.ndarray.__new__(
        np.memmap, shape, dtype, content, offset - first, strides
    )
    view.filename, view.mode, view.offset = content.filename, mode, first
    view._mmap = content._mmap
    return view


def _grain_memmap(array: np.memmap[Any, Any]) -> list[int] | None:
    return [1] * array.ndim if array.flags.writeable else None


class Dataset:
    """An HDF5 dataset, whose file is open only while it is read.

    HDF5 locks open files, so that others cannot write them.
    """

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        with self._open() as dataset:
            self.shape, self.dtype = tuple(dataset.shape), dataset.dtype

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        with importlib.import_module("h5py").File(self._path, "r") as file:
            yield file[self._name]

    def __getitem__(self, index: Any) -> Any:
        with self._open() as dataset:
            return dataset[index]


def _describe_dataset(dataset: Any) -> Description | None:
    # Others cannot open a file that is being written, nor one that is no file.
    if dataset.file.mode != "r" or dataset.file.driver not in ("sec2", "stdio"):
        return None
    path = os.path.realpath(dataset.file.filename)
    return {"place": [path, dataset.name]} if os.path.isfile(path) else None


def _reopen_dataset(description: Description, writable: bool) -> Any:
    return Dataset(*description["place"])


def _describe_zarr(array: Any) -> Description | None:
    store, path = array.store, array.path
    if type(store).__name__ == "LocalStore":
        root = os.path.realpath(store.root)  # Others may be in another folder.
        mode: Any = "r" if store.read_only else "r+"
        store = type(store)(root, read_only=store.read_only)
        zarr, kind = importlib.import_module("zarr"), array.metadata.zarr_format
        array = zarr.open_array(store, path=path, mode=mode, zarr_format=kind)
        return pickled(["file", root, path], array)
    if type(store).__name__ == "FsspecStore":
        protocol = store.fs.protocol
        if protocol != "memory" and "memory" not in protocol:  # That of this process.
            return pickled([protocol, store.path, path], array)
    return None


def _grain_zarr(array: Any) -> list[int] | None:
    """The cells that are written as one file."""
    if array.store.read_only:
        return None
    cells = getattr(array, "shards", None) or array.chunks
    return list(np.asarray(cells, int))


def page_shape(array: object) -> tuple[int, ...] | None:
    """The shape of what one page of a mapped file holds; None for other arrays."""
    if not isinstance(array, np.memmap):
        return None
    flags, axes = array.flags, range(array.ndim)
    if not (flags.c_contiguous or flags.f_contiguous):
        return None
    elements, shape = mmap.PAGESIZE // max(array.itemsize, 1), [1] * array.ndim
    for axis in reversed(axes) if flags.c_contiguous else axes:
        shape[axis] = max(min(array.shape[axis], elements), 1)
        elements //= shape[axis]
    return tuple(shape)


def borders(array: object, axis: int) -> tuple[int, ...] | None:
    """The starts of the chunks along an axis, except the first; None without chunks.

    The chunks of a zarr shard count as one.

    >>> import types
    >>> borders(types.SimpleNamespace(shape=(10,), chunks=(4,)), 0)
    (4, 8)
    """
    chunks = getattr(array, "shards", None) or getattr(array, "chunks", None)
    shape = getattr(array, "shape", ())
    if not isinstance(chunks, tuple | list) or len(chunks) != len(shape):
        return None
    length = chunks[axis]
    if isinstance(length, tuple | list):  # Of Dask: the lengths of all of them.
        return tuple(np.cumsum(length, dtype=int).tolist()[:-1])
    return tuple(range(int(length), shape[axis], int(length)))


def decoded_bytes(array: object) -> int:
    """The bytes that zarr holds while it reads a chunk, encoded and decoded.

    It is 0 for other arrays.
    """
    array, zarr = getattr(array, "stored", array), sys.modules.get("zarr")
    if zarr is None or not isinstance(array, zarr.Array):
        return 0
    return 2 * math.prod(array.chunks) * array.dtype.itemsize


def _aligned_buffer() -> dict[str, str]:
    """What makes zarr read to multiples of `ALIGNMENT`, if it reads to NumPy arrays."""
    usual = importlib.import_module("zarr.buffer").cpu.NDBuffer
    kind = _aligned(usual)
    is_usual = importlib.import_module("zarr.registry").get_ndbuffer_class() is usual
    return {"ndbuffer": f"{kind.__module__}.{kind.__qualname__}"} if is_usual else {}


@functools.cache
def _aligned(base: Any) -> Any:
    class Aligned(base):  # type: ignore[misc]
        @classmethod
        def empty(cls, shape: Any, dtype: Any, order: Any = "C") -> Any:
            if np.dtype(dtype).kind not in "biufc":
                return super().empty(shape, dtype, order)
            size = math.prod(shape) * np.dtype(dtype).itemsize
            memory = np.empty(size + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            return cls(np.ndarray(shape, dtype, memory, start, order=order))

    importlib.import_module("zarr.registry").register_ndbuffer(Aligned)
    return Aligned


@contextlib.contextmanager
def decoding_within(
    arrays: Iterable[Any], memory: int | None, read: int
) -> Iterator[Callable[[], None]]:
    """Makes zarr decode only so many chunks at once as fit in ``memory`` beside what is
    ``read``, at least one, to where XLA for CPU reads them without a copy.

    The last one may not be freed yet. Of files, it decodes as many as there are cores.
    What is called after each shard gives memory back to the system. Nothing is changed
    if no ``memory`` is given.
    """
    if memory is None:
        yield lambda: None
        return
    arrays = [getattr(array, "stored", array) for array in arrays]
    settings: Any = contextlib.nullcontext()
    if most := max(map(decoded_bytes, arrays), default=0):
        config = importlib.import_module("zarr").config
        at_once = max((memory - read) // most - 1, 1)
        stores = (array.store for array in arrays if decoded_bytes(array))
        if all(type(store).__name__ == "LocalStore" for store in stores):
            at_once = min(at_once, os.cpu_count() or 1)
        at_once = min(at_once, config.get("async.concurrency") or at_once)
        settings = config.set({"async.concurrency": at_once, **_aligned_buffer()})
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    resident = _resident() if trim else 0

    def trimmed() -> None:
        nonlocal resident
        # What glibc keeps can be several times a shard. What it gives back, the next
        # shard has to ask for again, page by page.
        if trim and _resident() - resident > memory / 2:
            trim(0)
            resident = _resident()

    with settings:
        yield trimmed
    if trim:
        trim(0)


def _resident() -> int:
    """The bytes of memory that this process takes besides files, on Linux."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * mmap.PAGESIZE


register_opener("h5py.Dataset", Opener("h5py", _describe_dataset, _reopen_dataset))
register_opener("zarr.Array", Opener("zarr", _describe_zarr, unpickled, _grain_zarr))
register_opener(
    "numpy.memmap", Opener("memmap", _describe_memmap, _reopen_memmap, _grain_memmap)
)
