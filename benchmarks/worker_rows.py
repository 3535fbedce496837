"""CPU seconds of workers on one machine: `python -m benchmarks.worker_rows`.

A plan of the job of `benchmarks.plan_rows` runs in N processes, each with its share of
the cores, and the CPU seconds of all of them are counted. What it takes to start them
is that of a plan with a shard for each, of a few rows.
"""

import argparse
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

import shardmap as sm
from benchmarks.plan_rows import BLOCK, cols, create, opened, weights

LIMIT = 1.15
SMALL = 64


class Run(NamedTuple):
    """What a run of N workers took, in seconds; CPU seconds without their start."""

    workers: int
    wall: float
    cpu: float
    start: float


def seconds_of_ended() -> float:
    """CPU seconds of all processes that this one has started, and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(folder: pathlib.Path, rows: int, shards: int, workers: int) -> np.ndarray:
    x, w = opened(folder, rows, "npy"), weights()
    made = sm.plan(cols, x, w, in_slices=({0: shards}, None))
    return made.run(x, w, executor=workers)


def measure(folder: pathlib.Path, rows: int, workers: int) -> tuple[Run, np.ndarray]:
    before = seconds_of_ended()
    run(folder, SMALL, workers, workers)
    between, begun = seconds_of_ended(), time.perf_counter()
    result = run(folder, rows, -(-rows // BLOCK), workers)
    wall, start = time.perf_counter() - begun, between - before
    cpu = seconds_of_ended() - between - start
    return Run(workers, wall, cpu, start), result


def near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both are the same but for rounding: sums depend on a process's cores."""
    return bool(np.abs(a - b).max() <= 1e-4 * np.abs(a).max())


def table(runs: list[Run]) -> str:
    """Medians by number of workers, and CPU seconds beside those of one worker."""
    lines = [f"{'workers':>8}{'wall s':>8}{'CPU s':>8}{'to one':>8}{'start':>8}"]
    one = None
    for workers in dict.fromkeys(run.workers for run in runs):
        same = [run for run in runs if run.workers == workers]
        wall, cpu, start = (
            statistics.median(times)
            for times in zip(*(run[1:] for run in same), strict=True)
        )
        one = one or cpu
        word = "ok" if cpu <= LIMIT * one else "MISS"
        lines.append(
            f"{workers:8}{wall:8.2f}{cpu:8.2f}{cpu / one:8.2f}{start:8.2f}  {word}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_rows")
    parser.add_argument("--rows", type=int, default=262_144, help="of 4 KiB each")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs, results = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for rows in (SMALL, options.rows):
            create(folder, rows, ["npy"])
        for _ in range(options.repeats):
            for workers in options.workers:
                made, result = measure(folder, options.rows, workers)
                runs.append(made)
                results.append(result)
    print(f"{options.rows * 4 / 2**20:.2f} GiB, {os.cpu_count()} cores")
    print(table(runs))
    same = all(near(results[0], result) for result in results)
    print("the same numbers" if same else "RESULTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
