"""Values that later stages need, in files instead of memory.

A run makes a folder of its own in ``scratch``, under a random name, and removes it when
it ends. That of a run that was killed, or interrupted while it removed the folder, is
removed by the next one.
"""

import contextlib
import errno
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
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.folder import (
    Folder,
    is_left,
    is_own,
    own_name,
    path_of,
)
from shardmap.units import size

PREFIX = "shardmap-"

_in_use: set[str] = set()


def checked(scratch: Any) -> pathlib.Path | None:
    """Checks ``scratch``, and returns the path of a folder, or None.

    Raises:
      TypeError, ValueError: it is no path.
    """
    return None if scratch is None else path_of("scratch", scratch)


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
    Folder(scratch, "scratch").make()
    for path in scratch.glob(f"{PREFIX}*"):
        # Of this process: a run that was interrupted while it removed its folder.
        unused = is_own(path.name) and path.name not in _in_use
        if (unused or is_left(path.name)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    folder = scratch / (PREFIX + own_name())
    _in_use.add(folder.name)

    def remove(value: Value) -> None:
        if arrays.pop(value, None) is not None:
            # Windows removes no mapped file; at the end it removes the folder.
            with contextlib.suppress(OSError):
                (folder / str(value.number)).unlink()

    try:
        folder.mkdir(mode=0o700)
        for value in values:
            path = folder / str(value.number)
            arrays[value] = _mapped(path, data_aval(value.aval))
        yield arrays, remove
    finally:
        _in_use.discard(folder.name)
        arrays.clear()
        shutil.rmtree(folder, ignore_errors=True)


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
