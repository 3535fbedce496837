"""The scoreboard of the field: jobs that make out-of-core tools fail, tool by tool.

    python -m benchmarks.field --gb 0.1

Each contender runs in a fresh process on arrays that lie in files, and tells its wall
seconds, CPU seconds, peak anonymous memory (RssAnon) and what the device of the files
was asked for. Imports are not counted, compilation is.
"""

import argparse
import importlib
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.field_jobs import BLOCK, GROUPED, GROUPS, HALO, JOBS, MAXIMUM, last
from benchmarks.plan_rows import Unowned, anonymous_bytes

LIMIT_HAND, LIMIT_BEST = 1.1, 1.1
OURS = "shardmap"


def rows_of(name: str, gigabytes: float) -> int:
    """How many rows the arrays of a job have in all these bytes."""
    job = JOBS[name]
    rows = int(gigabytes * 1e9 / (4 * np.prod(job.shape) * job.arrays))
    return max(rows - rows % (GROUPS * 8), GROUPS * 8)


def block_of(name: str) -> int:
    rows = BLOCK // (4 * int(np.prod(JOBS[name].shape)))
    return max(rows - rows % GROUPS, GROUPS)


def create(folder: pathlib.Path, name: str, gigabytes: float) -> None:
    job, rng = JOBS[name], np.random.default_rng(0)
    shape = (rows_of(name, gigabytes), *job.shape)
    for k in range(job.arrays):
        path = folder / f"{k}.npy"
        out = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        for start in range(0, shape[0], 1024):
            part = out[start : start + 1024]
            part[:] = rng.standard_normal(part.shape, np.float32)
        out.flush()


def opened(folder: pathlib.Path, name: str) -> list[Any]:
    paths = [folder / f"{k}.npy" for k in range(JOBS[name].arrays)]
    return [np.load(path, mmap_mode="r") for path in paths]


def planned(name: str, arrays: list[Any]) -> Any:
    import jax.numpy as jnp

    from shardmap.plan.plan import plan

    def fun(*args: Any) -> Any:
        return JOBS[name].fun(jnp, *args)

    pieces = max(1, arrays[0].shape[0] // block_of(name))
    bounds = _bounds(name, arrays[0].shape[0])
    cuts = bounds if name in GROUPED else pieces
    return plan(fun, *arrays, in_slices=tuple({0: cuts} for _ in arrays)).run(*arrays)


def _bounds(name: str, rows: int) -> list[tuple[int, int]]:
    step = block_of(name)
    return [(k, min(k + step, rows)) for k in range(0, rows, step)]


def blocks(name: str, arrays: list[Any]) -> Iterator[list[np.ndarray]]:
    halo = HALO.get(name, 0)
    rows = arrays[0].shape[0] - halo
    for start, stop in _bounds(name, rows):
        yield [np.asarray(array[start : stop + halo]) for array in arrays]


def by_hand(name: str, arrays: list[Any]) -> Any:
    import jax
    import jax.numpy as jnp

    job, rows = JOBS[name], arrays[0].shape[0]

    def total(kernel: Callable[..., Any], *more: Any) -> list[np.ndarray]:
        compiled = jax.jit(lambda *args: kernel(jnp, *args))
        sums: list[Any] = []
        for block in blocks(name, arrays):
            parts = [np.asarray(part) for part in compiled(*block, *more)]
            combine = np.maximum if name in MAXIMUM else np.add
            pairs = zip(sums or parts, parts, strict=True)
            sums = [combine(a, b) for a, b in pairs] if sums else parts
        return sums

    made = job.finish(total(job.kernel), rows)
    if job.second is None:
        return made
    return last(name, total(job.second, *made), rows)


def numpy_whole(name: str, arrays: list[Any]) -> Any:
    return JOBS[name].fun(np, *arrays)


def one_jit(name: str, arrays: list[Any]) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda *args: JOBS[name].fun(jnp, *args))(*arrays)


def dask_array(name: str, arrays: list[Any]) -> Any:
    import dask.array as da

    step = block_of(name)
    chunks = (step, *JOBS[name].shape)
    wrapped = [da.from_array(Unowned(x), chunks=chunks, asarray=True) for x in arrays]
    return JOBS[name].fun(da, *wrapped).compute()


CONTENDERS: dict[str, Callable[[str, list[Any]], Any]] = {
    OURS: planned,
    "jax by hand": by_hand,
    "numpy": numpy_whole,
    "one jax.jit": one_jit,
    "dask.array": dask_array,
}


IMPORTS = {
    OURS: ("jax.numpy", "shardmap.plan.plan"),
    "numpy": (),
    "dask.array": ("dask.array",),
}


def storage_bytes() -> int:
    """What this process has had the device of its files read and write."""
    text = pathlib.Path("/proc/self/io").read_text()
    found = dict(line.split(": ") for line in text.splitlines())
    return int(found["read_bytes"]) + int(found["write_bytes"])


def measure(contender: str, name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Runs one contender in this process."""
    for module in IMPORTS.get(contender, ("jax.numpy",)):
        importlib.import_module(module)
    arrays = opened(folder, name)
    peak, stop = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    used, moved = resource.getrusage(resource.RUSAGE_SELF), storage_bytes()
    start = time.perf_counter()
    try:
        result = np.asarray(CONTENDERS[contender](name, arrays))
        wall = time.perf_counter() - start
        now = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        stop.set()
        watcher.join()
    return {
        "job": name,
        "contender": contender,
        "wall": wall,
        "cpu": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "megabytes": max(peak[0], anonymous_bytes()) / 1e6,
        "storage": (storage_bytes() - moved) / 1e6,
        "norm": float(np.sqrt(np.square(result.astype(np.float64)).mean())),
    }


def verdict(results: list[dict[str, Any]]) -> str:
    """What was promised of one job, and whether it holds."""
    found = {result["contender"]: result for result in results}
    ours = found.get(OURS)
    if ours is None or len(found) < 2:
        return ""
    others = [result for name, result in found.items() if name != OURS]
    checks = []
    if "jax by hand" in found:
        ratio = ours["cpu"] / found["jax by hand"]["cpu"]
        word = "ok" if ratio <= LIMIT_HAND else "MISS"
        checks.append(f"CPU {ratio:.2f} x by hand: {word}")
    ratio = ours["wall"] / min(other["wall"] for other in others)
    checks.append(f"wall {ratio:.2f} x best: {'ok' if ratio <= LIMIT_BEST else 'MISS'}")
    ratio = ours["megabytes"] / min(other["megabytes"] for other in others)
    checks.append(f"memory {ratio:.2f} x least: {'ok' if ratio <= 1 else 'MISS'}")
    norms = [result["norm"] for result in results]
    if max(norms) - min(norms) > 1e-3 * max(norms):
        checks.append(f"RESULTS DIFFER: {norms}")
    return "; ".join(checks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field")
    parser.add_argument("--gb", type=float, default=0.1, help="of all arrays of a job")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "JOB", "FOLDER"))
    options = parser.parse_args()
    if options.one:
        contender, name, folder = options.one
        print(json.dumps(measure(contender, name, pathlib.Path(folder))))
        return 0
    found = []
    print(f"{'job':22}{'contender':13}{'wall s':>8}{'CPU s':>8}{'MB':>7}{'disk MB':>9}")
    for name in options.jobs:
        with tempfile.TemporaryDirectory() as folder:
            create(pathlib.Path(folder), name, options.gb)
            results = list(_run(name, folder, options.only))
        print(f"    {verdict(results)}", flush=True)
        found += results
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


def _run(name: str, folder: str, only: list[str]) -> Iterator[dict[str, Any]]:
    for contender in only:
        command = [sys.executable, "-m", "benchmarks.field", "--one"]
        done = subprocess.run(
            [*command, contender, name, folder], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
            print(f"{name:22}{contender:13} did not run: {reason}", flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:22}{contender:13}{result['wall']:8.2f}{result['cpu']:8.2f}"
            f"{result['megabytes']:7.0f}{result['storage']:9.1f}",
            flush=True,
        )
        yield result


if __name__ == "__main__":
    sys.exit(main())
