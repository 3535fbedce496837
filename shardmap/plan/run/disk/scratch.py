"""Values that later stages need, in files or a store instead of memory.

A run makes a folder or group of its own there, under a random name, and removes it when
it ends. That of a run that was killed is removed by the next one.
"""

import contextlib
import errno
import math
import os
import pathlib
import shutil
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from shardmap.arrays.sources.registry import About, Away, kind_named
from shardmap.plan.engine.keys import data_aval
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.stages import Result, Stage
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.folder import Folder, path_of
from shardmap.plan.run.disk.owned import is_left, own_name
from shardmap.units import size

PREFIX = "shardmap-"

CELL = 2**27
"""The most bytes of one cell of a store."""


class Place(Protocol):
    """Where arrays are made: a folder, or a group of a store."""

    def make(
        self, name: str, shape: tuple[int, ...], dtype: Any, cell: Sequence[int]
    ) -> Any: ...
    def remove(self, name: str) -> None: ...
    def close(self) -> None: ...


def checked(scratch: Any) -> Any:
    """What was given as ``scratch``: a folder as its path, or a group.

    Raises:
      TypeError: it is neither.
      ValueError: it is an empty path.
    """
    if scratch is None or hasattr(scratch, "create_array"):
        return scratch
    if isinstance(scratch, str | os.PathLike):
        return path_of("scratch", scratch)
    raise TypeError(
        "scratch must be a folder or a group of zarr, got "
        f"{scratch!r} of type {type(scratch).__name__}"
    )


@contextlib.contextmanager
def scratch_arrays(
    cut_program: CutProgram, scratch: Any
) -> Iterator[tuple[dict[Value, Any], Callable[[Value], None]]]:
    """Arrays in ``scratch`` for the values of a plan that go there.

    Gives:
      The arrays, and what removes one that is not needed any more.
    """
    found: dict[Value, Any] = {}
    results = _results(cut_program)
    if scratch is None or not results:
        yield found, lambda value: None
        return
    name = PREFIX + own_name()
    place: Place = (
        _Files(scratch, name)
        if isinstance(scratch, pathlib.Path)
        else _Group(scratch, name)
    )

    def remove(value: Value) -> None:
        if found.pop(value, None) is not None:
            place.remove(str(value.number))

    try:
        for stage, result in results:
            aval = data_aval(result.value.aval)
            cell = _cell(stage, result, aval.shape, aval.dtype.itemsize)
            try:
                found[result.value] = place.make(
                    str(result.value.number), aval.shape, aval.dtype, cell
                )
            except OSError as error:
                nbytes = math.prod(aval.shape) * aval.dtype.itemsize
                raise OSError(
                    error.errno,
                    f"scratch cannot take {size(nbytes)} of {aval.dtype}"
                    f"{list(aval.shape)} ({error.strerror}); a plan's str says how "
                    "much it keeps there",
                    str(scratch),
                ) from error
        yield found, remove
    finally:
        found.clear()
        place.close()


def _results(cut_program: CutProgram) -> list[tuple[Stage, Result]]:
    """What goes into ``scratch``, if there is one."""
    return [
        (stage, result)
        for stage in cut_program.stages
        for result in stage.results
        if cut_program.is_large(result.value)
    ]


def to_travel(cut_program: CutProgram, scratch: Any) -> dict[Value, Away]:
    """How other processes open the values in ``scratch``. Creates nothing."""
    name = "memmap" if isinstance(scratch, pathlib.Path) else "zarr"
    kind = kind_named(name)
    if scratch is None or kind is None:
        return {}
    found = {}
    for stage, result in _results(cut_program):
        aval, own = data_aval(result.value.aval), str(result.value.number)
        about: About | None = {"place": str(scratch), "name": own}
        grain: Sequence[int] = [1] * len(aval.shape)
        if name == "zarr":
            grain = _cell(stage, result, aval.shape, aval.dtype.itemsize)
            array = types.SimpleNamespace(
                store=scratch.store,
                path=f"{scratch.path}/{own}",
                metadata=scratch.metadata,
            )
            about = kind.describe(array) if _known(aval.dtype) else None
        if about is not None:
            found[result.value] = Away(name, about, kind.reopen, tuple(grain))
    return found


def _known(dtype: Any) -> bool:
    """Whether a store has a type; it does not have bfloat16."""
    return bool(np.dtype(dtype.str) == dtype)


def _cell(
    stage: Stage, result: Result, shape: Sequence[int], itemsize: int
) -> list[int]:
    """The lengths of the chunks: what one shard writes, or a part of it."""
    found = [max(length, 1) for length in shape]
    for axis, k in enumerate(result.axes):
        if k is not None:
            found[axis] = max(stage.loops[k].lengths)
    while math.prod(found) * itemsize > CELL:
        longest = found.index(max(found))
        found[longest] = -(-found[longest] // 2)
    return found


class _Files:
    """Files that are mapped into memory."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        Folder(folder, "scratch").make()
        for path in folder.glob(f"{PREFIX}*"):
            if is_left(path.name) and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
        self._path = folder / name
        self._path.mkdir(mode=0o700)

    def make(
        self, name: str, shape: tuple[int, ...], dtype: Any, cell: Sequence[int]
    ) -> Any:
        # Made anew, or not at all: no file that is there is opened, nor a link.
        with open(self._path / name, "xb+") as file:
            _reserve(file.fileno(), math.prod(shape) * dtype.itemsize)
            return np.memmap(file, dtype, "r+", shape=shape)

    def remove(self, name: str) -> None:
        # Where a file that is mapped cannot be removed, it is in the end.
        with contextlib.suppress(OSError):
            (self._path / name).unlink()

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def _reserve(file: int, nbytes: int) -> None:
    """Reserves the space of a file, so that no write finds the disk full."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
    os.truncate(file, nbytes)


class _Group:
    """Arrays of zarr."""

    def __init__(self, group: Any, name: str) -> None:
        self._group, self._name = group, name
        for key in list(group):
            if key.startswith(PREFIX) and is_left(key):
                with contextlib.suppress(KeyError):  # Another run was faster.
                    del group[key]
        self._own = group.create_group(name)

    def make(
        self, name: str, shape: tuple[int, ...], dtype: Any, cell: Sequence[int]
    ) -> Any:
        known = _known(dtype)
        array = self._own.create_array(
            name,
            shape=shape,
            dtype=dtype if known else f"u{dtype.itemsize}",
            chunks=tuple(cell),
            compressors=None,
            fill_value=0,
        )
        return array if known else _Bits(array, dtype)

    def remove(self, name: str) -> None:
        del self._own[name]

    def close(self) -> None:
        del self._group[self._name]


class _Bits:
    """An array of a type that its store does not know, such as bfloat16."""

    def __init__(self, array: Any, dtype: Any) -> None:
        self._array, self.dtype, self.shape = array, dtype, tuple(array.shape)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self._array[index]).view(self.dtype)

    def __setitem__(self, index: Any, part: Any) -> None:
        own = np.ascontiguousarray(np.asarray(part, self.dtype))
        self._array[index] = own.view(self._array.dtype)
