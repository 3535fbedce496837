"""Memory-mapped files."""

import mmap
import os
from typing import Any

import numpy as np

from shardmap.planning.sources.registry import Description, Opener, register_opener


def _describe(array: np.memmap[Any, Any]) -> Description | None:
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


def _reopen(description: Description, writable: bool) -> Any:
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


def _grain(array: np.memmap[Any, Any]) -> list[int] | None:
    return [1] * array.ndim if array.flags.writeable else None


register_opener("numpy.memmap", Opener("memmap", _describe, _reopen, _grain))
