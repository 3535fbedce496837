"""Jobs of the scoreboard whose result is as large as what they read: file to file."""

import importlib
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.field.tasks import (
    COLUMNS,
    CUBED,
    DASK,
    GROUPS,
    HAND,
    JIT,
    NUMPY,
    OURS,
    Contender,
    Ready,
    Task,
    block_of,
    bounds,
    create_npy,
    create_zarr,
    empty_npy,
    empty_zarr,
    namespace_of_cubed,
    of_cubed,
    of_dask,
    open_npy,
    open_zarr,
    rows_of,
)

LONG, NARROW = 8192, 64
"""The chunks of a transposed array: as many bytes as those of the array, and other
numbers."""


@dataclass(frozen=True)
class Stored:
    """A function of an array in a file, whose result goes to another file."""

    fun: Callable[..., Any]
    """The plain function, with `jax.numpy` as the first argument."""
    by_hand: Callable[[Any, Any, int], Ready]
    """The same in JAX, block by block, from one array into another."""
    rows: Callable[[float], int]
    """How many rows there are in so many gigabytes, read and written."""
    step: Callable[[int], int]
    """How many rows a block has, of so many."""
    shape: Callable[[int], tuple[int, ...]]
    """That of the result."""
    chunks: Callable[[int], tuple[int, ...]]
    """Those of the result."""
    from_zarr: bool = False
    to_zarr: bool = False


def _step(rows: int) -> int:
    return min(block_of(COLUMNS), rows)


def _rows(gigabytes: float) -> int:
    return rows_of(gigabytes, 2 * COLUMNS)


def _same(rows: int) -> tuple[int, ...]:
    return rows, COLUMNS


def _in_rows(rows: int) -> tuple[int, ...]:
    return _step(rows), COLUMNS


def _softmax(xp: Any, x: Any) -> Any:
    raised = xp.exp(x - xp.max(x, axis=1)[:, None])
    return raised / xp.sum(raised, axis=1)[:, None]


def _softmax_by_hand(x: Any, out: Any, step: int) -> Ready:
    import jax
    import jax.numpy as jnp

    compiled = jax.jit(lambda block: _softmax(jnp, block))

    def run() -> None:
        for start, stop in bounds(x.shape[0], step):
            out[start:stop] = np.asarray(compiled(x[start:stop]))

    return Ready(run)


def _standard(xp: Any, x: Any) -> Any:
    mean = xp.mean(x, axis=0)
    return (x - mean) / xp.sqrt(xp.mean(x * x, axis=0) - mean * mean)


def _standard_by_hand(x: Any, out: Any, step: int) -> Ready:
    import jax

    moments = jax.jit(lambda block: (block.sum(0), (block * block).sum(0)))
    scale = jax.jit(lambda block, mean, deviation: (block - mean) / deviation)

    def run() -> None:
        total, squares = np.zeros((2, COLUMNS), np.float32)
        for start, stop in bounds(x.shape[0], step):
            one, two = moments(np.asarray(x[start:stop]))
            total, squares = total + np.asarray(one), squares + np.asarray(two)
        mean = total / x.shape[0]
        deviation = np.sqrt(squares / x.shape[0] - mean * mean)
        for start, stop in bounds(x.shape[0], step):
            block = np.asarray(x[start:stop])
            out[start:stop] = np.asarray(scale(block, mean, deviation))

    return Ready(run)


def _transposed(xp: Any, x: Any) -> Any:
    return x.T


def _transposed_by_hand(x: Any, out: Any, step: int) -> Ready:
    import jax

    compiled = jax.jit(lambda block: block.T)

    def run() -> None:
        for start, stop in bounds(x.shape[0], step):
            out[:, start:stop] = np.asarray(compiled(x[start:stop]))

    return Ready(run)


def _product(xp: Any, x: Any) -> Any:
    return x @ x.T


def _product_by_hand(x: Any, out: Any, step: int) -> Ready:
    import jax

    compiled = jax.jit(lambda a, b: a @ b.T)

    def run() -> None:
        for start, stop in bounds(x.shape[0], step):
            a = np.asarray(x[start:stop])
            for first, last in bounds(x.shape[0], step):
                b = np.asarray(x[first:last])
                out[start:stop, first:last] = np.asarray(compiled(a, b))

    return Ready(run)


def _side(gigabytes: float) -> int:
    """The rows of a matrix that has, with its product, so many bytes."""
    half = COLUMNS / 2
    rows = int(np.sqrt(gigabytes * 1e9 / 4 + half * half) - half)
    return max(rows - rows % (GROUPS * 8), GROUPS * 8)


def _tile(rows: int) -> int:
    return min(1024, rows)


JOBS: Mapping[str, Stored] = {
    "softmax, zarr to zarr": Stored(
        _softmax,
        _softmax_by_hand,
        _rows,
        _step,
        _same,
        _in_rows,
        from_zarr=True,
        to_zarr=True,
    ),
    "standardised to zarr": Stored(
        _standard, _standard_by_hand, _rows, _step, _same, _in_rows, to_zarr=True
    ),
    "rechunk, transposed": Stored(
        _transposed,
        _transposed_by_hand,
        _rows,
        lambda rows: min(LONG, rows),
        lambda rows: (COLUMNS, rows),
        lambda rows: (NARROW, min(LONG, rows)),
        from_zarr=True,
        to_zarr=True,
    ),
    "a @ a.T": Stored(
        _product,
        _product_by_hand,
        _side,
        _tile,
        lambda rows: (rows, rows),
        lambda rows: (_tile(rows), _tile(rows)),
    ),
}


def _create(job: Stored, folder: pathlib.Path, gigabytes: float) -> None:
    rows = job.rows(gigabytes)
    if job.from_zarr:
        create_zarr(folder / "x.zarr", (rows, COLUMNS), _in_rows(rows))
    else:
        create_npy(folder / "x.npy", (rows, COLUMNS))


def _opened(job: Stored, folder: pathlib.Path) -> Any:
    if job.from_zarr:
        return open_zarr(folder / "x.zarr")
    return open_npy(folder / "x.npy")


def _planned(job: Stored, x: Any, out: Any) -> Ready:
    import jax.numpy as jnp

    from shardmap.planning.in_slices import Pieces
    from shardmap.planning.plan import plan

    # Other pieces would write chunks of the result in part, and read them before.
    cuts = {0: Pieces(job.step(x.shape[0]))}
    made = plan(lambda x: job.fun(jnp, x), x, in_slices=cuts)
    return Ready(lambda: made.run(x, out=out), made)


def _numpy(job: Stored, x: Any, out: Any) -> Ready:
    def run() -> None:
        out[...] = job.fun(np, np.asarray(x[...]))

    return Ready(run)


def _one_jit(job: Stored, x: Any, out: Any) -> Ready:
    import jax
    import jax.numpy as jnp

    compiled = jax.jit(lambda x: job.fun(jnp, x))

    def run() -> None:
        out[...] = np.asarray(compiled(np.asarray(x[...])))

    return Ready(run)


def _dask(job: Stored, x: Any, out: Any) -> Ready:
    da = importlib.import_module("dask.array")
    rows = x.shape[0]
    chunks = _tile(rows) if job.fun is _product else _step(rows)
    made = job.fun(da, of_dask(x, (chunks, COLUMNS)))
    made = made.rechunk(job.chunks(rows))
    return Ready(lambda: da.store(made, out, lock=False))


def _cubed(job: Stored, folder: pathlib.Path, out: pathlib.Path) -> Ready:
    out.mkdir()
    xp, cubed = namespace_of_cubed(out / "work"), importlib.import_module("cubed")
    x = _opened(job, folder)
    rows = x.shape[0]
    chunks = _tile(rows) if job.fun is _product else _step(rows)
    made = job.fun(xp, of_cubed(x, (chunks, COLUMNS))).rechunk(job.chunks(rows))

    def run() -> Any:
        cubed.to_zarr(made, str(out / "out.zarr"))
        return open_zarr(out / "out.zarr")

    return Ready(run)


def _task(job: Stored) -> Task:
    def into_file(prepare: Callable[[Stored, Any, Any], Ready]) -> Contender:
        def contender(folder: pathlib.Path, out: pathlib.Path) -> Ready:
            x = _opened(job, folder)
            shape, chunks = job.shape(x.shape[0]), job.chunks(x.shape[0])
            made = empty_zarr(out, shape, chunks) if job.to_zarr else None
            made = empty_npy(out, shape) if made is None else made
            ready = prepare(job, x, made)

            def run() -> Any:
                ready.run()
                if hasattr(made, "flush"):
                    made.flush()
                return made

            return ready._replace(run=run)

        return contender

    return Task(
        lambda folder, gigabytes: _create(job, folder, gigabytes),
        {
            OURS: into_file(_planned),
            HAND: into_file(
                lambda job, x, out: job.by_hand(x, out, job.step(x.shape[0]))
            ),
            NUMPY: into_file(_numpy),
            JIT: into_file(_one_jit),
            DASK: into_file(_dask),
            CUBED: lambda folder, out: _cubed(job, folder, out),
        },
    )


TASKS: Mapping[str, Task] = {name: _task(job) for name, job in JOBS.items()}
