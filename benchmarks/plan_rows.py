"""The out-of-core job ``cols``: a planned function against what else there is.

    python -m benchmarks.plan_rows --rows 1048576 --folder cols

standardises the columns of a float32 array that is on disk, multiplies it with a
matrix, takes tanh and sums over the rows. Each contender runs in a process of its own
and tells its CPU seconds, wall seconds and peak anonymous memory (RssAnon).
"""

import argparse
import functools
import importlib.metadata
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import OURS, Benchmark, Contender

COLUMNS, OUTPUTS, BLOCK, ZARR_CHUNK = 1024, 256, 8_192, 8_192
EPSILON = 1e-3
LIMIT_HAND, LIMIT_MEGABYTES, LIMIT_DASK = 1.2, 300, 0.5


def weights() -> np.ndarray:
    shape = (COLUMNS, OUTPUTS)
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32) / 32


def cols(x: Any, w: Any) -> Any:
    """The job as one plain JAX function."""
    import jax.numpy as jnp

    mean = x.mean(0)
    deviation = jnp.sqrt((x * x).mean(0) - mean * mean + EPSILON)
    return jnp.tanh(((x - mean) / deviation) @ w).sum(0)


def planned(x: Any, w: np.ndarray) -> np.ndarray:
    from shardmap.planning.plan import plan

    made = plan(cols, x, w, in_slices=({0: -(-x.shape[0] // BLOCK)}, None))
    return made.run(x, w)


@functools.cache
def kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def moments(block):
        return block.sum(0), (block * block).sum(0)

    @jax.jit
    def finish(block, mean, deviation, w):
        return jnp.tanh(((block - mean) / deviation) @ w).sum(0)

    return moments, finish


def by_hand(x: Any, w: np.ndarray, rows: int = BLOCK) -> np.ndarray:
    """What one writes who knows the job, block by block: the limit."""
    moments, finish = kernels()
    starts = range(0, x.shape[0], rows)
    total, squares = np.zeros(COLUMNS, np.float32), np.zeros(COLUMNS, np.float32)
    for start in starts:
        one, two = moments(np.asarray(x[start : start + rows]))
        total, squares = total + np.asarray(one), squares + np.asarray(two)
    mean = total / x.shape[0]
    deviation = np.sqrt(squares / x.shape[0] - mean * mean + EPSILON)
    result = np.zeros(OUTPUTS, np.float32)
    for start in starts:
        block = np.asarray(x[start : start + rows])
        result += np.asarray(finish(block, mean, deviation, w))
    return result


def numpy_chunks(x: Any, w: np.ndarray) -> np.ndarray:
    starts = range(0, x.shape[0], BLOCK)
    total, squares = np.zeros(COLUMNS), np.zeros(COLUMNS)
    for start in starts:
        block = np.asarray(x[start : start + BLOCK])
        total += block.sum(0)
        squares += np.square(block).sum(0)
    mean = (total / x.shape[0]).astype(np.float32)
    variance = squares / x.shape[0] - mean * mean + EPSILON
    deviation = np.sqrt(variance).astype(np.float32)
    result = np.zeros(OUTPUTS, np.float32)
    for start in starts:
        block = np.asarray(x[start : start + BLOCK])
        result += np.tanh(((block - mean) / deviation) @ w).sum(0)
    return result


def one_jit(x: Any, w: np.ndarray) -> np.ndarray:
    import jax

    whole = x if isinstance(x, np.ndarray) else np.asarray(x[...])
    return np.asarray(jax.jit(cols)(whole, w))


class Unowned:
    """Hides that an array is one, so that dask does not copy it whole."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self.array[index])


def dask_array(x: Any, w: np.ndarray) -> np.ndarray:
    import dask.array as da

    wrapped = da.from_array(Unowned(x), chunks=(BLOCK, COLUMNS), asarray=True)
    mean = wrapped.mean(0)
    deviation = da.sqrt((wrapped * wrapped).mean(0) - mean * mean + EPSILON)
    return da.tanh(((wrapped - mean) / deviation) @ w).sum(0).compute()


CONTENDERS: dict[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "shardmap": planned,
    "jax by hand": by_hand,
    "numpy chunks": numpy_chunks,
    "dask.array": dask_array,
    "one jax.jit": one_jit,
}


SMALL, SMALL_BLOCK = 16_384, 1_024


def small() -> dict[str, Contender]:
    """The job in memory, which `python -m benchmarks` runs."""
    import jax

    from shardmap.planning.plan import plan

    shape = (SMALL, COLUMNS)
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    w = weights()
    made = plan(cols, x, w, in_slices=({0: SMALL // SMALL_BLOCK}, None))
    whole = jax.jit(cols)
    return {
        OURS: Contender(lambda: made.run(x, w)),
        "jax by hand": Contender(lambda: by_hand(x, w, SMALL_BLOCK)),
        "one jax.jit": Contender(lambda: np.asarray(whole(x, w))),
    }


BENCHMARKS = (
    Benchmark(
        "plan, two stages",
        "column statistics, matmul, tanh and sum over 16 blocks of 4 MiB",
        small,
        {"jax by hand": LIMIT_HAND},
        repeats=20,
    ),
)


def create(folder: pathlib.Path, rows: int, kinds: list[str]) -> None:
    """Writes the array, where it is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"x{rows}.npy"
    rng = np.random.default_rng(0)
    if not path.exists():
        shape = (rows, COLUMNS)
        out = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        for start in range(0, rows, BLOCK):
            stop = min(rows, start + BLOCK)
            out[start:stop] = rng.standard_normal((stop - start, COLUMNS), np.float32)
        out.flush()
    if "zarr" in kinds and not (folder / f"x{rows}.zarr").exists():
        import zarr

        source = np.load(path, mmap_mode="r")
        target = zarr.create_array(
            folder / f"x{rows}.zarr",
            shape=source.shape,
            dtype=source.dtype,
            chunks=(min(rows, ZARR_CHUNK), COLUMNS),
        )
        for start in range(0, rows, BLOCK):
            target[start : start + BLOCK] = source[start : start + BLOCK]


def opened(folder: pathlib.Path, rows: int, kind: str) -> Any:
    if kind == "npy":
        return np.load(folder / f"x{rows}.npy", mmap_mode="r")
    import zarr

    return zarr.open_array(folder / f"x{rows}.zarr", mode="r")


def anonymous_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure(name: str, folder: pathlib.Path, rows: int, kind: str) -> dict[str, Any]:
    """Runs one contender in this process, imports and compilation included."""
    x, w = opened(folder, rows, kind), weights()
    before = anonymous_bytes()
    peak, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    used = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    try:
        result = CONTENDERS[name](x, w)
        wall = time.perf_counter() - start
        now = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        stop.set()
        watcher.join()
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {
        "contender": name,
        "input": kind,
        "wall": wall,
        "cpu": cpu,
        "megabytes": max(peak[0], anonymous_bytes()) / 1e6,
        "checksum": float(np.asarray(result, np.float64).sum()),
    }


def verdicts(results: list[dict[str, Any]]) -> list[str]:
    """What was promised, and whether it holds."""
    found = []
    for kind in dict.fromkeys(result["input"] for result in results):
        by_name = {r["contender"]: r for r in results if r["input"] == kind}
        ours = by_name.get("shardmap")
        if ours is None:
            continue
        for other, limit in (("jax by hand", LIMIT_HAND), ("dask.array", LIMIT_DASK)):
            if other in by_name and (other != "dask.array" or kind == "npy"):
                ratio = ours["cpu"] / by_name[other]["cpu"]
                word = "ok" if ratio <= limit else "MISS"
                found.append(
                    f"{kind}: CPU {ratio:.2f} x {other}, at most {limit}: {word}"
                )
        word = "ok" if ours["megabytes"] <= LIMIT_MEGABYTES else "MISS"
        found.append(
            f"{kind}: {ours['megabytes']:.0f} MB anonymous, at most "
            f"{LIMIT_MEGABYTES}: {word}"
        )
    return found


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_rows")
    parser.add_argument("--rows", type=int, default=1_048_576)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("cols"))
    parser.add_argument("--inputs", nargs="+", default=["npy", "zarr"])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--keep", action="store_true", help="keep the array")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--one", nargs=2, metavar=("NAME", "INPUT"))
    options = parser.parse_args()
    if options.one:
        name, kind = options.one
        print(json.dumps(measure(name, options.folder, options.rows, kind)))
        return 0
    create(options.folder, options.rows, options.inputs)
    print(", ".join(map(version, ("jax", "jaxlib", "numpy", "dask", "zarr"))))
    results = []
    print(f"{'contender':14} {'input':5} {'wall s':>7} {'CPU s':>7} {'MB':>6}")
    for kind in options.inputs:
        for name in options.only:
            command = [sys.executable, "-m", "benchmarks.plan_rows", "--rows"]
            command += [str(options.rows), "--folder", str(options.folder)]
            done = subprocess.run(
                [*command, "--one", name, kind], capture_output=True, text=True
            )
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
                print(f"{name:14} {kind:5} did not run: {reason}")
                continue
            result = json.loads(done.stdout.splitlines()[-1])
            results.append(result)
            print(
                f"{name:14} {kind:5} {result['wall']:7.2f} {result['cpu']:7.2f} "
                f"{result['megabytes']:6.0f}  sum {result['checksum']:.3f}",
                flush=True,
            )
    print("\n".join(verdicts(results)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    if not options.keep:
        shutil.rmtree(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
