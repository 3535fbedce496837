"""Values that later stages need, in files or a zarr group instead of memory.

A run makes a folder or group of its own in ``scratch``, under a random name, and
removes it when it ends. That of a run that was killed is removed by the next one.
"""

import contextlib
import errno
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardmap._jax.types import Aval
from shardmap.planning.engine.keys import data_aval
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.stages import Result, Stage
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.folder import Folder, is_left, own_name, path_of
from shardmap.units import shown, size

PREFIX = "shardmap-"

CHUNK = 2**27
"""The most bytes of a chunk."""


def checked(scratch: Any) -> Any:
    """Checks ``scratch``, and returns None, a zarr group, or the path of a folder.

    Raises:
      TypeError, ValueError: it is neither.
    """
    if scratch is None or hasattr(scratch, "create_array"):
        return scratch
    if not isinstance(scratch, str | os.PathLike):
        raise TypeError(
            "scratch must be the path of a folder or a zarr group, got "
            f"{shown(scratch)}"
        )
    return path_of("scratch", scratch)


def _chunks_of_values(cut_program: CutProgram) -> dict[Value, tuple[int, ...]]:
    """The values that go into ``scratch``, if there is one, with their chunks."""
    return {
        result.value: _chunks(stage, result)
        for stage in cut_program.stages
        for result in stage.results
        if cut_program.is_large(result.value)
    }


def _chunks(stage: Stage, result: Result) -> tuple[int, ...]:
    """The lengths of a chunk: what one shard writes, or a part of it."""
    aval = data_aval(result.value.aval)
    lengths = [max(length, 1) for length in aval.shape]
    for axis, k in enumerate(result.axes):
        if k is not None:
            lengths[axis] = max(stage.loops[k].lengths)
    while math.prod(lengths) * aval.dtype.itemsize > CHUNK:
        longest = lengths.index(max(lengths))
        lengths[longest] = -(-lengths[longest] // 2)
    return tuple(lengths)


@contextlib.contextmanager
def scratch_arrays(
    cut_program: CutProgram, scratch: Any
) -> Iterator[tuple[dict[Value, Any], Callable[[Value], None]]]:
    """Arrays in ``scratch`` for the values of a plan that go there.

    Yields:
      The arrays, and a function that removes one that is not needed any more.

    Raises:
      OSError: there is no space for them.
    """
    arrays: dict[Value, Any] = {}
    values = {} if scratch is None else _chunks_of_values(cut_program)
    if not values:
        yield arrays, lambda value: None
        return

    def remove(value: Value) -> None:
        if arrays.pop(value, None) is not None:
            delete(str(value.number))

    place = _in_folder if isinstance(scratch, pathlib.Path) else _in_group
    with place(scratch) as (make, delete):
        try:
            for value, chunks in values.items():
                arrays[value] = make(str(value.number), data_aval(value.aval), chunks)
            yield arrays, remove
        finally:
            arrays.clear()


Place = tuple[Callable[[str, Aval, tuple[int, ...]], Any], Callable[[str], None]]
"""Functions that make and delete an array in a folder or group."""


@contextlib.contextmanager
def _in_folder(scratch: pathlib.Path) -> Iterator[Place]:
    Folder(scratch, "scratch").make()
    for path in scratch.glob(f"{PREFIX}*"):
        if is_left(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    folder = scratch / (PREFIX + own_name())
    folder.mkdir(mode=0o700)

    def delete(name: str) -> None:
        # Windows removes no mapped file; at the end it removes the folder.
        with contextlib.suppress(OSError):
            (folder / name).unlink()

    try:
        yield lambda name, aval, chunks: _mapped(folder / name, aval), delete
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _in_group(scratch: Any) -> Iterator[Place]:
    for name in list(scratch):
        if name.startswith(PREFIX) and is_left(name):
            with contextlib.suppress(KeyError):  # Another run was faster.
                del scratch[name]
    name = PREFIX + own_name()
    group = scratch.create_group(name)
    try:
        yield functools.partial(_stored, group), group.__delitem__
    finally:
        del scratch[name]


def _stored(group: Any, name: str, aval: Aval, chunks: tuple[int, ...]) -> Any:
    foreign = _is_foreign(aval.dtype)
    array = group.create_array(
        name,
        shape=aval.shape,
        dtype=f"u{aval.dtype.itemsize}" if foreign else aval.dtype,
        chunks=chunks,
        compressors=None,
        fill_value=0,
    )
    return _Bits(array, aval.dtype) if foreign else array


def _is_foreign(dtype: np.dtype) -> bool:
    """Whether a dtype is not NumPy's own, such as bfloat16; zarr has none of these."""
    return dtype.isbuiltin == 2


class _Bits:
    """An array of zarr that has the bits of another dtype."""

    def __init__(self, array: Any, dtype: np.dtype) -> None:
        self._array, self.dtype, self.shape = array, dtype, array.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._array[index]).view(self.dtype)

    def __setitem__(self, index: Any, part: Any) -> None:
        bits = np.ascontiguousarray(part, self.dtype)
        self._array[index] = bits.view(self._array.dtype)


def _mapped(path: pathlib.Path, aval: Aval) -> np.memmap:
    nbytes = math.prod(aval.shape) * aval.dtype.itemsize
    try:
        # Mode "x" opens no file that exists, and follows no link.
        with open(path, "xb+") as file:
            reserve(file.fileno(), nbytes)
            return np.memmap(file, aval.dtype, "r+", shape=aval.shape)
    except OSError as error:
        raise OSError(
            error.errno,
            f"scratch cannot take {size(nbytes)} of {aval.dtype}{list(aval.shape)} "
            f"({error.strerror}); a plan's str says how much it keeps there",
            str(path.parent.parent),
        ) from error


def reserve(file: int, nbytes: int) -> None:
    """Reserves the space of a file, so that no write finds the disk full."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
    os.truncate(file, nbytes)
