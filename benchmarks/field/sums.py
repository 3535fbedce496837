"""Jobs of the scoreboard whose result is small: sums over the rows of large arrays.

Each has the function, written once for JAX, NumPy, dask.array and cubed, whose
interfaces are NumPy's, and what one writes by hand in JAX, block by block.
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.field.tasks import (
    CENTERS,
    COLUMNS,
    CUBED,
    DASK,
    GROUPS,
    HAND,
    JIT,
    NUMPY,
    OURS,
    SIDE,
    Contender,
    Ready,
    Task,
    block_of,
    bounds,
    create_npy,
    namespace_of_cubed,
    of_cubed,
    of_dask,
    open_npy,
    rows_of,
    weights,
)


@dataclass(frozen=True)
class Job:
    """A function over the rows of some arrays, and the same by hand."""

    arrays: int
    """How many arrays there are, of equal shapes."""
    fun: Callable[..., Any]
    """The plain function, of these, with `jax.numpy` as the first argument."""
    kernel: Callable[..., Any]
    """By hand: what is done with a block, jit-compiled; it gives sums."""
    finish: Callable[..., Any]
    """By hand: what becomes of the sums over all blocks, and the number of rows."""
    second: Callable[..., Any] | None = None
    """By hand: a second pass over the blocks, which gets what `finish` gives."""
    last: Callable[..., Any] = lambda sums, rows: sums[0]
    """By hand: what becomes of the second sums."""
    shape: tuple[int, ...] = (COLUMNS,)
    """That of a row."""
    halo: int = 0
    """How many rows of the next block a block by hand needs."""
    combine: Callable[..., Any] = np.add
    """By hand: how the sums of blocks are put together."""
    """Whether blocks are whole groups."""

    @property
    def floats(self) -> int:
        return int(np.prod(self.shape))

    @property
    def step(self) -> int:
        return block_of(self.floats)

    @property
    def chunks(self) -> tuple[int, ...]:
        return (self.step, *self.shape)


def _chosen(xp: Any, mask: Any) -> Any:
    return xp.where(mask, xp.asarray(np.float32(1)), xp.asarray(np.float32(0)))


def _quadratic(xp: Any, u: Any, v: Any) -> Any:
    return xp.stack([xp.mean(a * b, axis=0) for a, b in ((u, u), (v, v), (u, v))])


def _grouped(xp: Any, x: Any) -> Any:
    return xp.reshape(x, (-1, GROUPS, x.shape[1]))


def _anomaly(xp: Any, x: Any) -> Any:
    grouped = _grouped(xp, x)
    return xp.std(grouped - xp.mean(grouped, axis=0)[None], axis=0)


def _climatology(xp: Any, x: Any) -> Any:
    return xp.mean(_grouped(xp, x), axis=0)


def _months(xp: Any, x: Any) -> Any:
    return xp.stack([xp.mean(x[k::GROUPS], axis=0) for k in range(GROUPS)])


def _curl(xp: Any, u: Any, v: Any) -> Any:
    return xp.roll(v, -1, axis=2) - v - xp.roll(u, -1, axis=1) + u


def _vorticity(xp: Any, u: Any, v: Any) -> Any:
    return xp.mean(_curl(xp, u, v), axis=0)


WINDOW = 8
"""The rows of a moving average."""


def _averages(xp: Any, x: Any) -> Any:
    rows = x.shape[0] - WINDOW + 1
    total = x[:rows]
    for k in range(1, WINDOW):
        total = total + x[k : rows + k]
    return xp.max(total / WINDOW, axis=0)


def _difference(xp: Any, x: Any) -> Any:
    return xp.max(xp.abs(x[2:] - 2 * x[1:-1] + x[:-2]), axis=0)


def _residuals(xp: Any, x: Any) -> Any:
    return xp.sum((x - xp.mean(x, axis=1)[:, None]) ** 2)


def _filtered(xp: Any, x: Any) -> Any:
    kept = _chosen(xp, x > 0)
    return xp.sum(x * kept, axis=0) / xp.sum(kept, axis=0)


def _gram(xp: Any, x: Any) -> Any:
    return x.T @ x


def _covariance(xp: Any, x: Any) -> Any:
    mean = xp.mean(x, axis=0)
    return x.T @ x / x.shape[0] - mean[:, None] * mean[None]


def _project(xp: Any, x: Any) -> Any:
    mean = xp.mean(x, axis=0)
    deviation = xp.sqrt(xp.mean(x * x, axis=0) - mean * mean + 1e-3)
    return xp.sum(xp.tanh((x - mean) / deviation @ xp.asarray(weights())), axis=0)


def _kernel_nearest(xp: Any, x: Any) -> Any:
    centers = weights()[:, :CENTERS].T * np.float32(32)
    lengths = xp.asarray((centers * centers).sum(1))
    distance = lengths[None] - 2 * (x @ xp.asarray(centers).T)
    chosen = _chosen(xp, xp.argmin(distance, axis=1)[:, None] == xp.arange(CENTERS))
    return chosen.T @ x, xp.sum(chosen, axis=0)


def _nearest(xp: Any, x: Any) -> Any:
    sums, counts = _kernel_nearest(xp, x)
    return sums / xp.maximum(counts, xp.asarray(np.float32(1)))[:, None]


def _moments(xp: Any, x: Any) -> Any:
    return xp.sum(x, axis=0), xp.sum(x * x, axis=0)


def _scale(sums: Any, rows: int) -> Any:
    mean = sums[0] / rows
    return mean, np.sqrt(sums[1] / rows - mean * mean + 1e-3)


JOBS: Mapping[str, Job] = {
    "quadratic means": Job(
        2,
        _quadratic,
        lambda xp, u, v: ((u * u).sum(0), (v * v).sum(0), (u * v).sum(0)),
        lambda sums, rows: np.stack(sums) / rows,
    ),
    "anomaly by group": Job(
        1,
        _anomaly,
        lambda xp, x: (_grouped(xp, x).sum(0),),
        lambda sums, rows: (sums[0] / (rows // GROUPS),),
        lambda xp, x, mean: (((_grouped(xp, x) - mean[None]) ** 2).sum(0),),
        lambda sums, rows: np.sqrt(sums[0] / (rows // GROUPS)),
    ),
    "climatology over time": Job(
        1,
        _climatology,
        lambda xp, x: (_grouped(xp, x).sum(0),),
        lambda sums, rows: sums[0] / (rows // GROUPS),
    ),
    "means of months": Job(
        1,
        _months,
        lambda xp, x: (_grouped(xp, x).sum(0),),
        lambda sums, rows: sums[0] / (rows // GROUPS),
    ),
    "vorticity with wrap": Job(
        2,
        _vorticity,
        lambda xp, u, v: (_curl(xp, u, v).sum(0),),
        lambda sums, rows: sums[0] / rows,
        shape=(SIDE, SIDE),
    ),
    "sum of residuals": Job(
        1,
        _residuals,
        lambda xp, x: (_residuals(xp, x),),
        lambda sums, rows: sums[0],
    ),
    "filter then mean": Job(
        1,
        _filtered,
        lambda xp, x: (xp.where(x > 0, x, 0).sum(0), (x > 0).sum(0)),
        lambda sums, rows: sums[0] / sums[1],
    ),
    "gram": Job(1, _gram, lambda xp, x: (x.T @ x,), lambda sums, rows: sums[0]),
    "PCA by covariance": Job(
        1,
        _covariance,
        lambda xp, x: (x.sum(0), x.T @ x),
        lambda sums, rows: sums[1] / rows - np.outer(sums[0] / rows, sums[0] / rows),
    ),
    "standardise, project": Job(
        1,
        _project,
        _moments,
        _scale,
        lambda xp, x, mean, deviation: (
            xp.tanh((x - mean) / deviation @ xp.asarray(weights())).sum(0),
        ),
    ),
    "k-means step": Job(
        1,
        _nearest,
        _kernel_nearest,
        lambda sums, rows: sums[0] / np.maximum(sums[1], 1)[:, None],
    ),
    "double difference": Job(
        1,
        _difference,
        lambda xp, x: (_difference(xp, x),),
        lambda sums, rows: sums[0],
        halo=2,
        combine=np.maximum,
    ),
    "moving averages": Job(
        1,
        _averages,
        lambda xp, x: (_averages(xp, x),),
        lambda sums, rows: sums[0],
        halo=WINDOW - 1,
        combine=np.maximum,
    ),
}


def _paths(job: Job, folder: pathlib.Path) -> list[pathlib.Path]:
    return [folder / f"{k}.npy" for k in range(job.arrays)]


def _opened(job: Job, folder: pathlib.Path) -> list[Any]:
    return [open_npy(path) for path in _paths(job, folder)]


def _create(job: Job, folder: pathlib.Path, gigabytes: float) -> None:
    for path in _paths(job, folder):
        create_npy(path, (rows_of(gigabytes, job.floats * job.arrays), *job.shape))


def _planned(job: Job, arrays: list[Any]) -> Ready:
    import jax.numpy as jnp

    from shardmap.planning.plan import plan

    def fun(*args: Any) -> Any:
        return job.fun(jnp, *args)

    cuts = bounds(arrays[0].shape[0], job.step)
    made = plan(fun, *arrays, in_slices=tuple({0: cuts} for _ in arrays))
    return Ready(lambda: made.run(*arrays), made)


def _blocks(job: Job, arrays: list[Any]) -> Iterator[list[np.ndarray]]:
    rows = arrays[0].shape[0] - job.halo
    for start, stop in bounds(rows, job.step):
        yield [np.asarray(array[start : stop + job.halo]) for array in arrays]


def _by_hand(job: Job, arrays: list[Any]) -> Ready:
    import jax
    import jax.numpy as jnp

    rows = arrays[0].shape[0]
    first = jax.jit(lambda *args: job.kernel(jnp, *args))
    second = job.second and jax.jit(functools.partial(job.second, jnp))

    def total(compiled: Callable[..., Any], *more: Any) -> list[np.ndarray]:
        sums: list[Any] = []
        for block in _blocks(job, arrays):
            parts = [np.asarray(part) for part in compiled(*block, *more)]
            pairs = zip(sums or parts, parts, strict=True)
            sums = [job.combine(a, b) for a, b in pairs] if sums else parts
        return sums

    def run() -> Any:
        made = job.finish(total(first), rows)
        return job.last(total(second, *made), rows) if second else made

    return Ready(run)


def _numpy(job: Job, arrays: list[Any]) -> Ready:
    return Ready(lambda: job.fun(np, *arrays))


def _one_jit(job: Job, arrays: list[Any]) -> Ready:
    import jax
    import jax.numpy as jnp

    compiled = jax.jit(functools.partial(job.fun, jnp))
    return Ready(lambda: np.asarray(compiled(*arrays)))


def _dask(job: Job, arrays: list[Any]) -> Ready:
    import dask.array as da

    return Ready(job.fun(da, *(of_dask(x, job.chunks) for x in arrays)).compute)


def _task(job: Job) -> Task:
    def of_arrays(prepare: Callable[[Job, list[Any]], Ready]) -> Contender:
        return lambda folder, out: prepare(job, _opened(job, folder))

    def by_cubed(folder: pathlib.Path, out: pathlib.Path) -> Ready:
        xp = namespace_of_cubed(out)
        arrays = [of_cubed(x, job.chunks) for x in _opened(job, folder)]
        return Ready(job.fun(xp, *arrays).compute)

    return Task(
        lambda folder, gigabytes: _create(job, folder, gigabytes),
        {
            OURS: of_arrays(_planned),
            HAND: of_arrays(_by_hand),
            NUMPY: of_arrays(_numpy),
            JIT: of_arrays(_one_jit),
            DASK: of_arrays(_dask),
            CUBED: by_cubed,
        },
    )


TASKS: Mapping[str, Task] = {name: _task(job) for name, job in JOBS.items()}
