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

from shardmap.planning.engine.keys import data_aval, nbytes
from shardmap.planning.engine.nodes import Value
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.folder import make_folder, path_of
from shardmap.units import size

PREFIX = "shardmap-"


def checked(scratch: Any) -> pathlib.Path | None:
    """Checks ``scratch``, and returns the path of a folder, or None.

    Raises:
      TypeError, ValueError: it is no path on a disk.
    """
    if scratch is None:
        return None
    if "://" in (path := path_of("scratch", scratch)):
        raise ValueError(f"scratch must be a folder on a disk, got {path!r}")
    return pathlib.Path(path)


@contextlib.contextmanager
def scratch_arrays(
    cut_program: CutProgram, scratch: pathlib.Path | None
) -> Iterator[tuple[dict[Value, Any], Callable[[Value], None]]]:
    """Arrays in ``scratch`` for the values of a plan that go there.

    Yields:
      The arrays, and a function that removes one that is not needed any more.

    Raises:
      OSError: there is no space for them.
    """
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
                arrays[value] = _mapped(folder / str(value.number), value)
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


def _mapped(path: pathlib.Path, value: Value) -> np.memmap:
    aval = data_aval(value.aval)
    try:
        with open(path, "xb+") as file:
            reserve(file.fileno(), nbytes(value))
            return np.memmap(file, aval.dtype, "r+", shape=aval.shape)
    except OSError as error:
        raise OSError(
            error.errno,
            f"scratch cannot take {size(nbytes(value))} of "
            f"{aval.dtype}{list(aval.shape)} ({error.strerror}); a plan's str says how "
            "much it keeps there",
            str(path.parent.parent),
        ) from error


def reserve(file: int, count: int) -> None:
    """Reserves the bytes of a file, so that no write finds the disk full."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, count)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
    os.truncate(file, count)
