"""Analyses of the scoreboard as an array scientist writes them, one function each.

The functions are those of xarray where time has labels, and of NumPy's interface
otherwise. Dask's form is another one where `dask.array` lacks the function.
"""

import functools
import importlib
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.field.tasks import (
    CENTERS,
    COLUMNS,
    DASK,
    JIT,
    NUMPY,
    OURS,
    Contender,
    Ready,
    Task,
    bounds,
    create_npy,
    of_dask,
    open_npy,
    rows_of,
    weights,
)

PIECES = 20
"""How many pieces of rows a plan cuts."""

WIDE, SAMPLES, IMAGE = 8 * COLUMNS, 4096, 32
STEPS, RATE, NEAREST, ZONES, HIDDEN = 90, np.float32(0.1), 8, 8, 32
MEMORY = 2**24


@dataclass(frozen=True)
class Analysis:
    """A function of an array whose first axis is time, or samples."""

    fun: Callable[..., Any]
    """The function, with `jax.numpy` or NumPy as the first argument."""
    dask: Callable[[Any], Any] | None = None
    """Of an array of Dask, where ``fun`` does not take `dask.array`."""
    labelled: bool = False
    """Whether ``fun`` takes a DataArray with days as labels, and no module."""
    shape: tuple[int, ...] = (COLUMNS,)
    """That of a row."""


def _months(t: Any) -> Any:
    return t.groupby("time.month").mean()


def _anomalies(t: Any) -> Any:
    return ((t.groupby("time.month") - _months(t)) ** 2).mean("time")


def _days(t: Any) -> Any:
    return t.groupby("time.dayofyear").mean()


def _resampled(t: Any) -> Any:
    return t.resample(time="MS").mean()


def _spans(xp: Any, x: Any) -> Any:
    return xp.stack([xp.mean(x[i:j], axis=0) for i, j in bounds(x.shape[0], 30)])


def _descended(xp: Any, x: Any) -> Any:
    """Steps of gradient descent for least squares."""
    w = xp.zeros(x.shape[1], np.float32)

    def step(w: Any) -> Any:
        return w - RATE * (x.T @ (x @ w - x[:, 0])) / x.shape[0]

    if xp.__name__ == "jax.numpy":
        import jax

        return jax.lax.fori_loop(0, STEPS, lambda _, w: step(w), w)
    for _ in range(STEPS):
        w = step(w)
    return w


def _descended_in_dask(x: Any) -> Any:
    w = np.zeros(x.shape[1], np.float32)
    for _ in range(STEPS):
        w = w - RATE * (x.T @ (x @ w - x[:, 0]) / x.shape[0]).compute()
    return w


def _queries() -> np.ndarray:
    return weights()[:, :CENTERS].T * np.float32(32)


def _distances(xp: Any, x: Any) -> Any:
    return xp.sum(x * x, axis=1)[None] - 2 * (xp.asarray(_queries()) @ x.T)


def _nearest(xp: Any, x: Any) -> Any:
    """The distances of the nearest rows to some points."""
    if xp is np:
        return np.sort(np.partition(_distances(np, x), NEAREST, axis=1)[:, :NEAREST], 1)
    import jax

    return -jax.lax.top_k(-_distances(xp, x), NEAREST)[0]


def _nearest_in_dask(x: Any) -> Any:
    return -(-_distances(importlib.import_module("dask.array"), x)).topk(
        NEAREST, axis=1
    )


def _detrended(xp: Any, x: Any) -> Any:
    """The deviation from a line that is fitted to each column."""
    time = xp.arange(x.shape[0], dtype=np.float32) / x.shape[0]
    line = xp.stack([xp.ones_like(time), time], axis=1)
    return xp.mean((x - line @ xp.linalg.lstsq(line, x)[0]) ** 2, axis=0)


def _detrended_by_sums(x: Any) -> Any:
    da = importlib.import_module("dask.array")
    time = da.arange(x.shape[0], dtype=np.float32, chunks=x.chunks[0]) / x.shape[0]
    line = da.stack([da.ones_like(time), time], axis=1).rechunk((x.chunks[0], 2))
    fitted = da.linalg.solve(line.T @ line, line.T @ x)
    return ((x - line @ fitted.rechunk((2, -1))) ** 2).mean(axis=0)


def _spectrum(xp: Any, x: Any) -> Any:
    return xp.linalg.eigh(x.T @ x / x.shape[0])[0]


def _spectrum_in_dask(x: Any) -> Any:
    return np.linalg.eigvalsh((x.T @ x / x.shape[0]).compute())


def _blur(xp: Any, x: Any) -> Any:
    """A 3 x 3 mean of an image."""
    rows = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    return (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 9


def _convolved(xp: Any, x: Any) -> Any:
    """Two convolutions of each image, and the largest value of each pixel."""
    if xp is np:
        return np.max(np.maximum(_blur(np, np.maximum(_blur(np, x), 0)), 0), axis=0)
    import jax

    kernel = np.full((1, 1, 3, 3), 1 / 9, np.float32)

    def of_image(image: Any) -> Any:
        made = image[None, None]
        for _ in range(2):
            made = jax.nn.relu(jax.lax.conv(made, kernel, (1, 1), "VALID"))
        return made[0, 0]

    return xp.max(jax.vmap(of_image)(x), axis=0)


def _convolved_in_dask(x: Any) -> Any:
    def of_block(block: np.ndarray) -> np.ndarray:
        return np.maximum(_blur(np, np.maximum(_blur(np, block), 0)), 0)

    side = IMAGE - 4
    made = x.map_blocks(of_block, dtype=np.float32, chunks=(x.chunks[0], side, side))
    return made.max(axis=0)


def _quantiles(xp: Any, x: Any) -> Any:
    return xp.quantile(x, np.float32([0.1, 0.5, 0.9]), axis=0)


def _quantiles_in_dask(x: Any) -> Any:
    columns = x.rechunk((-1, COLUMNS // PIECES))
    return columns.map_blocks(
        functools.partial(_quantiles, np),
        dtype=np.float64,
        chunks=(3, columns.chunks[1]),
    )


def _layers() -> tuple[np.ndarray, np.ndarray]:
    first = weights()[:, :HIDDEN]
    return first, np.linspace(-1, 1, HIDDEN, dtype=np.float32)


def _slope(xp: Any, x: Any) -> Any:
    """The gradient of the loss of a network of two layers."""
    first, second = _layers()
    target = x[:, 0]
    if xp.__name__ == "jax.numpy":
        import jax

        def loss(first: Any) -> Any:
            return ((xp.tanh(x @ first) @ second - target) ** 2).mean()

        return jax.grad(loss)(first)
    hidden = xp.tanh(x @ first)
    error = 2 * (hidden @ second - target) / x.shape[0]
    return x.T @ (error[:, None] * second[None] * (1 - hidden * hidden))


def _zones() -> np.ndarray:
    return np.arange(COLUMNS) * 7 % ZONES


def _zonal(xp: Any, x: Any) -> Any:
    """The mean and the largest value of each zone."""
    parts = [x[:, _zones() == k] for k in range(ZONES)]
    means = xp.stack([xp.mean(part) for part in parts])
    return xp.stack([means, xp.stack([xp.max(part) for part in parts])])


def _integral(xp: Any, uniform: Any, x: Any) -> Any:
    """A Monte Carlo integral, with pairs that cancel most of the variance."""
    return xp.mean(xp.exp(-(uniform**2)) + xp.exp(-((1 - uniform) ** 2)))


def _bootstrap(xp: Any, uniform: Any, x: Any) -> Any:
    """The mean and the deviation of the means of samples that are drawn again."""

    def drawn(uniform: Any) -> Any:
        return x[(uniform * SAMPLES).astype(np.int32)]

    if xp.__name__ == "dask.array":
        means = xp.mean(uniform.map_blocks(drawn, dtype=np.float32), axis=1)
    else:
        means = xp.mean(drawn(uniform), axis=1)
    return xp.stack([xp.mean(means), xp.std(means)])


JOBS: Mapping[str, Analysis] = {
    "means of labelled months": Analysis(_months, labelled=True, shape=(WIDE,)),
    "anomalies of months": Analysis(_anomalies, labelled=True, shape=(WIDE,)),
    "means of days of a year": Analysis(_days, labelled=True, shape=(WIDE,)),
    "resampled to months": Analysis(_resampled, labelled=True, shape=(WIDE,)),
    "means of spans": Analysis(_spans),
    "90 steps of descent": Analysis(_descended, _descended_in_dask),
    "nearest neighbours": Analysis(_nearest, _nearest_in_dask),
    "detrended": Analysis(_detrended, _detrended_by_sums),
    "spectrum of x.T @ x": Analysis(_spectrum, _spectrum_in_dask),
    "two convolutions": Analysis(_convolved, _convolved_in_dask, shape=(IMAGE, IMAGE)),
    "quantiles along time": Analysis(_quantiles, _quantiles_in_dask),
    "gradient of a network": Analysis(_slope),
    "zonal statistics": Analysis(_zonal),
}

DRAWN = {"Monte Carlo integral": _integral, "bootstrap": _bootstrap}


def _rows_of(job: Analysis, gigabytes: float) -> int:
    return rows_of(gigabytes, int(np.prod(job.shape)))


def _opened(job: Analysis, folder: pathlib.Path) -> Any:
    x = open_npy(folder / "x.npy")
    if not job.labelled:
        return x
    days = np.datetime64("1980-01-01", "ns") + np.arange(len(x)).astype("m8[D]")
    xarray = importlib.import_module("xarray")
    return xarray.DataArray(x, {"time": days}, ("time", "x"))


def _planned(job: Analysis, folder: pathlib.Path, out: pathlib.Path) -> Ready:
    import jax.numpy as jnp

    from shardmap.planning.plan import plan

    x = _opened(job, folder)
    fun = job.fun if job.labelled else functools.partial(job.fun, jnp)
    made = plan(fun, x, in_slices={"time" if job.labelled else 0: PIECES})
    return Ready(lambda: np.asarray(made.run(x)), made)


def _numpy(job: Analysis, folder: pathlib.Path, out: pathlib.Path) -> Ready:
    x = _opened(job, folder)
    fun = job.fun if job.labelled else functools.partial(job.fun, np)
    return Ready(lambda: np.asarray(fun(x)))


def _dask(job: Analysis, folder: pathlib.Path, out: pathlib.Path) -> Ready:
    x = _opened(job, folder)
    step = -(-x.shape[0] // PIECES)
    if job.labelled:
        return Ready(lambda: np.asarray(job.fun(x.chunk(time=step))))
    da = importlib.import_module("dask.array")
    fun = job.dask or functools.partial(job.fun, da)
    chunked = of_dask(x, (step, *job.shape))
    return Ready(lambda: np.asarray(fun(chunked)))


def _task(job: Analysis) -> Task:
    def of(prepare: Callable[..., Ready]) -> Contender:
        return functools.partial(prepare, job)

    def create(folder: pathlib.Path, gigabytes: float) -> None:
        create_npy(folder / "x.npy", (_rows_of(job, gigabytes), *job.shape))

    return Task(create, {OURS: of(_planned), NUMPY: of(_numpy), DASK: of(_dask)})


def _drawn(fun: Callable[..., Any]) -> Task:
    """A job whose large array is drawn at random; the file says how much."""

    def create(folder: pathlib.Path, gigabytes: float) -> None:
        x = np.random.default_rng(0).standard_normal(SAMPLES, np.float32)
        np.savez(folder / "x.npz", x=x + 10, rows=rows_of(gigabytes, SAMPLES))

    def opened(folder: pathlib.Path) -> tuple[np.ndarray, tuple[int, int]]:
        with np.load(folder / "x.npz") as found:
            return found["x"], (int(found["rows"]), SAMPLES)

    def planned(folder: pathlib.Path, out: pathlib.Path) -> Ready:
        import jax
        import jax.numpy as jnp

        from shardmap.planning.plan import plan

        x, shape = opened(folder)
        key = jax.random.key(0)
        made = plan(
            lambda key, x: fun(jnp, jax.random.uniform(key, shape), x),
            key,
            x,
            memory=MEMORY,
        )
        return Ready(lambda: np.asarray(made.run(key, x)), made)

    def whole(folder: pathlib.Path, out: pathlib.Path) -> Ready:
        import jax
        import jax.numpy as jnp

        x, shape = opened(folder)
        key = jax.random.key(0)
        compiled = jax.jit(lambda key, x: fun(jnp, jax.random.uniform(key, shape), x))
        return Ready(lambda: np.asarray(compiled(key, x)))

    def by_numpy(folder: pathlib.Path, out: pathlib.Path) -> Ready:
        x, shape = opened(folder)
        rng = np.random.default_rng(0)
        return Ready(lambda: np.asarray(fun(np, rng.random(shape, np.float32), x)))

    def by_dask(folder: pathlib.Path, out: pathlib.Path) -> Ready:
        da = importlib.import_module("dask.array")
        x, shape = opened(folder)
        chunks = -(-shape[0] // PIECES), SAMPLES
        rng = da.random.default_rng(0)
        uniform = rng.random(shape, dtype=np.float32, chunks=chunks)
        return Ready(lambda: np.asarray(fun(da, uniform, x)))

    contenders = {OURS: planned, JIT: whole, NUMPY: by_numpy, DASK: by_dask}
    return Task(create, contenders)


TASKS: Mapping[str, Task] = {
    **{name: _task(job) for name, job in JOBS.items()},
    **{name: _drawn(fun) for name, fun in DRAWN.items()},
}
