"""Values that later stages need, in files instead of memory.

A run makes a folder of its own in ``scratch``, which it locks, and removes it when it
ends. A lock ends with its process: the next run removes what a killed one has left.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardmap.planning.engine.nodes import Value, data_aval
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.folder import make_folder, path_of
from shardmap.units import size

PREFIX = "shardmap-scratch-"
"""What is found under such a name, and is not locked, is removed."""


def checked(scratch: Any) -> pathlib.Path | None:
    """Checks ``scratch``, and returns the path of a folder, or None."""
    if scratch is None:
        return None
    if "://" in (path := path_of("scratch", scratch)):
        raise ValueError(f"scratch must be a folder on a disk, got {path!r}")
    return pathlib.Path(path)


@contextlib.contextmanager
def scratch_arrays(
    cut_program: CutProgram, scratch: pathlib.Path | None
) -> Iterator[tuple[dict[Value, Any], Callable[[Value], None]]]:
    """Arrays for the values that go there, and what removes one."""
    arrays: dict[Value, Any] = {}
    values = [
        result.value
        for stage in cut_program.stages
        for result in stage.results
        if cut_program.is_large(result.value)
    ]
    if scratch is None or not values:
        yield arrays, lambda value: None
        return
    make_folder("scratch", scratch)
    for path in scratch.glob(f"{PREFIX}*"):
        with _locked(path) as is_left:
            if is_left:
                shutil.rmtree(path, ignore_errors=True)
    # It has its name when it is locked.
    folder = pathlib.Path(tempfile.mkdtemp(prefix=".", dir=scratch))

    def remove(value: Value) -> None:
        if arrays.pop(value, None) is not None:
            (folder / str(value.number)).unlink()

    with _locked(folder):
        folder = folder.rename(scratch / f"{PREFIX}{folder.name[1:]}")
        try:
            for value in values:
                aval, path = data_aval(value.aval), folder / str(value.number)
                arrays[value] = np.memmap(path, aval.dtype, "w+", shape=aval.shape)
                reserve("scratch", arrays[value])
            yield arrays, remove
        finally:
            arrays.clear()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[bool]:
    """Takes the lock of a folder; whether no one else has it."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:  # Or the file system has no locks.
        is_free = False
    try:
        yield is_free
    finally:
        os.close(file)


def reserve(what: str, array: np.memmap) -> None:
    """Reserves a mapped file's space: a write that finds none would end the process."""
    path: Any = array.filename
    count = os.path.getsize(path)
    try:
        with open(path, "rb+") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, count)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise OSError(
                error.errno,
                f"{what} cannot take {size(count)} of {array.dtype}"
                f"{list(array.shape)} ({error.strerror})",
                str(path),
            ) from error
