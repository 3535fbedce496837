"""What jobs on a zarr store take, beside Dask: CPU seconds, planning included.

    python -m benchmarks.stores [--only NAME] [--steps 2920] [--memory "150 MB"]

The store has 181 by 240 float32 for each step of time, 0.5 GB by default, in 80 chunks.
Each job runs once for each tool, and both write the same chunks. Next to the seconds
stands how many times those of Dask ours are, and whether that is within `MOST_TIMES`.
"""

import argparse
import pathlib
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

MOST_TIMES = 1.2
BINS = np.linspace(200, 360, 161).astype(np.float32)
KERNEL = np.ones((1, 5, 5), np.float32) / 25


def ours(job: str, stored: Any, create: Callable[..., Any], memory: str) -> Any:
    import jax
    import jax.numpy as jnp
    import scipy.ndimage

    import shardmap as sm

    def per_piece(fun, shape, dtype, axes):
        return lambda t: sm.per_piece(
            fun, jax.ShapeDtypeStruct(shape, dtype), t.data, axes=axes
        )

    def convolved(t):
        kernel = KERNEL.reshape(1, 1, 5, 5)
        x = t.data[:, None]
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")[:, 0]

    steps, rows, columns = stored.shape
    chunks = stored.encoding["chunks"]
    jobs = {
        "resample": (lambda t: t.resample(time="MS").mean(), None),
        "transpose": (
            lambda t: jnp.transpose(t.data),
            lambda: create(stored.shape[::-1], (10, 20, steps)),
        ),
        "rechunk": (
            lambda t: jnp.copy(t.data),
            lambda: create(stored.shape, (steps, 10, 20)),
        ),
        "histogram": (lambda t: jnp.histogram(t.data, BINS)[0], None),
        "histogram of NumPy": (
            per_piece(
                lambda x: np.histogram(x, BINS)[0],
                *((160,), np.int32, "t y x -> *; t add; y add; x add"),
            ),
            None,
        ),
        "median": (lambda t: jnp.median(t.data, 0), None),
        "median of NumPy": (
            per_piece(
                lambda x: np.median(x, 0),
                *((rows, columns), np.float32, "* y x -> y x"),
            ),
            None,
        ),
        "convolution": (convolved, lambda: create(stored.shape, chunks)),
        "convolution of SciPy": (
            lambda t: sm.per_piece(
                lambda x: scipy.ndimage.convolve(x, KERNEL, mode="constant"),
                *(t.data, t.data),
                axes="t * * -> t * *",
            ),
            lambda: create(stored.shape, chunks),
        ),
        "anomaly": (
            lambda t: t.groupby("time.month") - t.groupby("time.month").mean(),
            lambda: create(stored.shape, chunks),
        ),
        "rolling mean": (
            lambda t: t.rolling(time=30).mean(),
            lambda: create(stored.shape, chunks),
        ),
    }
    fun, out = jobs[job]
    return sm.plan(fun, stored, memory=memory, out=out and out()).run()


def of_dask(job: str, t: Any, create: Callable[..., Any]) -> Any:
    import dask.array as da
    import scipy.ndimage

    def store(x, chunks):
        return da.store(x.rechunk(chunks), create(x.shape, chunks), lock=False)

    x, chunks = t.data, t.encoding["chunks"]
    match job.partition(" of ")[0]:
        case "resample":
            return t.resample(time="MS").mean().compute()
        case "transpose":
            return store(x.T, (10, 20, len(x)))
        case "rechunk":
            return store(x, (len(x), 10, 20))
        case "histogram":
            return da.histogram(x, BINS)[0].compute()
        case "median":
            return da.median(x, 0).compute()
        case "convolution":
            return store(
                x.map_overlap(
                    lambda each: scipy.ndimage.convolve(each, KERNEL, mode="constant"),
                    **{"depth": (0, 2, 2), "boundary": 0.0, "dtype": x.dtype},
                ),
                chunks,
            )
        case "anomaly":
            groups = t.groupby("time.month")
            return store((groups - groups.mean()).data, chunks)
        case "rolling mean":
            return store(t.rolling(time=30).mean().data, chunks)


JOBS = (
    *("resample", "transpose", "rechunk", "histogram", "histogram of NumPy"),
    *("median", "median of NumPy", "convolution", "convolution of SciPy"),
    *("anomaly", "rolling mean"),
)


def seconds(run: Callable[[], Any]) -> float:
    """The CPU seconds of a call, of all threads of this process."""

    def now() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    start = now()
    run()
    return now() - start


def main(arguments: list[str] | None = None) -> None:
    import dask.array as da  # The imports are not counted.
    import scipy.ndimage  # noqa: F401
    import xarray as xr
    import zarr

    import shardmap as sm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=2920)
    parser.add_argument("--memory", default="150 MB")
    options = parser.parse_args(arguments)
    steps, chunks = options.steps, (options.steps // 10, 46, 120)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        lazy = da.random.default_rng(0).normal(
            280, 10, (steps, 181, 240), chunks=chunks
        )
        hours = np.arange(steps) * np.timedelta64(6, "h")
        times = np.datetime64("2000-01-01", "ns") + hours
        array = xr.DataArray(lazy.astype("f4"), {"time": times}, ("time", "y", "x"))
        array.to_dataset(name="t").to_zarr(folder / "t", consolidated=False)
        x = np.ones(8, np.float32)
        sm.plan(lambda x: x + 1, x, memory="1 kB").run(x)

        def create(shape: Any, chunks: Any) -> Any:
            return zarr.create_array(
                folder / "out", shape=shape, chunks=chunks, dtype="f4", overwrite=True
            )

        print(f"{'':20}{'shardmap':>10}{'dask':>8}{'times':>7}")
        for job in (job for job in JOBS if options.only in job):
            stored, chunked = (
                xr.open_zarr(folder / "t", chunks=c, consolidated=False).t
                for c in (None, {})
            )
            here = seconds(lambda: ours(job, stored, create, options.memory))  # noqa: B023
            there = seconds(lambda: of_dask(job, chunked, create))  # noqa: B023
            verdict = "ok" if here <= MOST_TIMES * there else "MISS"
            print(
                f"{job:20}{here:10.2f}{there:8.2f}{here / there:7.1f} {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
