"""What a row of the scoreboard is, and the arrays in files that it works on."""

import functools
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.plan_rows import Unowned

if TYPE_CHECKING:  # Other tools are measured without it.
    from shardmap import ShardPlan

COLUMNS, OUTPUTS, GROUPS, CENTERS, SIDE = 512, 64, 12, 16, 64

BLOCK = 2**22
"""The bytes of a block."""

OURS, HAND, NUMPY, JIT, DASK, CUBED = (
    "shardmap",
    "jax by hand",
    "numpy",
    "one jax.jit",
    "dask.array",
    "cubed",
)


class Ready(NamedTuple):
    """A job that can run; the first run compiles."""

    run: Callable[[], Any]
    """Gives the result, or something to read it from."""
    plan: "ShardPlan | None" = None
    """What runs, if it is a plan."""


Contender: TypeAlias = Callable[[pathlib.Path, pathlib.Path], Ready]
"""Gets the folder of the arrays, and where a result may be written."""


@dataclass(frozen=True)
class Task:
    """A row of the scoreboard."""

    create: Callable[[pathlib.Path, float], None]
    """Writes the arrays of a job that has so many gigabytes of them."""
    contenders: Mapping[str, Contender]


def rows_of(gigabytes: float, floats: int) -> int:
    """How many rows of so many numbers there are; whole groups, of whole blocks."""
    rows = int(gigabytes * 1e9 / (4 * floats))
    return max(rows - rows % (GROUPS * 8), GROUPS * 8)


def block_of(floats: int) -> int:
    """How many such rows a block has; whole groups."""
    rows = BLOCK // (4 * floats)
    return max(rows - rows % GROUPS, GROUPS)


def bounds(rows: int, step: int) -> list[tuple[int, int]]:
    return [(k, min(k + step, rows)) for k in range(0, rows, step)]


def parts(shape: Sequence[int]) -> Iterator[tuple[slice, np.ndarray]]:
    """Random numbers for an array, some rows after the other."""
    rng = np.random.default_rng(0)
    for start, stop in bounds(shape[0], 1024):
        made = rng.standard_normal((stop - start, *shape[1:]), np.float32)
        yield slice(start, stop), made


def create_npy(path: pathlib.Path, shape: tuple[int, ...]) -> None:
    out = empty_npy(path, shape)
    for rows, part in parts(shape):
        out[rows] = part
    out.flush()


def empty_npy(path: pathlib.Path, shape: tuple[int, ...]) -> Any:
    return np.lib.format.open_memmap(path, "w+", np.float32, shape)


def open_npy(path: pathlib.Path) -> Any:
    return np.load(path, mmap_mode="r")


def create_zarr(
    path: pathlib.Path, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    out = empty_zarr(path, shape, chunks)
    whole = np.concatenate([part for _, part in parts((chunks[0], *shape[1:]))])
    for k, (start, stop) in enumerate(bounds(shape[0], chunks[0])):
        out[start:stop] = whole[: stop - start] + np.float32(k % 7)


def empty_zarr(
    path: pathlib.Path, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> Any:
    """An array without compression, which would be what is measured."""
    zarr = importlib.import_module("zarr")
    return zarr.create_array(
        str(path), shape=shape, chunks=chunks, dtype="float32", compressors=None
    )


def open_zarr(path: pathlib.Path) -> Any:
    return importlib.import_module("zarr").open_array(str(path), mode="r")


def of_dask(array: Any, chunks: tuple[int, ...]) -> Any:
    da = importlib.import_module("dask.array")
    return da.from_array(Unowned(array), chunks=chunks, asarray=True)


def namespace_of_cubed(work: pathlib.Path) -> Any:
    """The functions of cubed, whose arrays in between lie in a folder."""
    cubed = importlib.import_module("cubed")
    cubed.config.set({"spec.allowed_mem": "2GB", "spec.work_dir": str(work)})
    return importlib.import_module("cubed.array_api")


def of_cubed(array: Any, chunks: tuple[int, ...]) -> Any:
    return importlib.import_module("cubed").from_array(array, chunks=chunks)


@functools.cache
def weights() -> np.ndarray:
    shape = (COLUMNS, OUTPUTS)
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32) / 32


def forget(folder: pathlib.Path) -> None:
    """Has the system let go of what it holds of files, so that they are read again."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
