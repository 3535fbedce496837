"""Runs the scoreboard of the field.

    python -m benchmarks.field --gb 0.1

Each contender runs in a fresh process on arrays that lie in files, which the system has
let go of, and tells its wall seconds, CPU seconds, peak anonymous memory (RssAnon) and
the bytes that it had the device of the files read and write. Imports are not counted,
compilation is. cubed is tried where it is installed.
"""

import argparse
import importlib
import importlib.util
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.field import descent, stored, sums
from benchmarks.field.tasks import (
    CUBED,
    DASK,
    HAND,
    JIT,
    NUMPY,
    OURS,
    bounds,
    forget,
)
from benchmarks.plan_rows import anonymous_bytes

LIMIT_HAND, LIMIT_BEST = 1.1, 1.1
TASKS = {**sums.TASKS, **stored.TASKS, **descent.TASKS}
IMPORTS = {
    OURS: ("jax.numpy", "shardmap.plan.plan"),
    HAND: ("jax.numpy",),
    JIT: ("jax.numpy",),
    NUMPY: ("numpy",),
    DASK: ("dask.array",),
    CUBED: ("cubed.array_api",),
}


def traffic() -> tuple[int, int]:
    """What this process has had the device of its files read, and write."""
    text = pathlib.Path("/proc/self/io").read_text()
    found = dict(line.split(": ") for line in text.splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def measure(contender: str, name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Runs one contender in this process."""
    for module in IMPORTS[contender]:
        importlib.import_module(module)
    peak, stop = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    out = folder.with_name(f"{folder.name}-out")
    watcher = threading.Thread(target=watch)
    watcher.start()
    used, moved = resource.getrusage(resource.RUSAGE_SELF), traffic()
    start = time.perf_counter()
    try:
        result = TASKS[name].contenders[contender](folder, out)
        wall = time.perf_counter() - start
        now, after = resource.getrusage(resource.RUSAGE_SELF), traffic()
    finally:
        stop.set()
        watcher.join()
    found = {
        "job": name,
        "contender": contender,
        "wall": wall,
        "cpu": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "megabytes": max(peak[0], anonymous_bytes()) / 1e6,
        "read": (after[0] - moved[0]) / 1e6,
        "written": (after[1] - moved[1]) / 1e6,
        "norm": norm(result),
    }
    shutil.rmtree(out, ignore_errors=True)
    out.unlink(missing_ok=True)
    return found


def norm(result: Any) -> float:
    """The root of the mean square, weighted so that places count."""
    shape, total = np.shape(result), 0.0
    flat = np.asarray(result).reshape(1, -1) if len(shape) < 2 else result
    columns = np.cos(np.arange(flat.shape[-1]))
    for start, stop in bounds(flat.shape[0], 1024):
        part = np.asarray(flat[start:stop], np.float64) * columns
        rows = np.cos(np.arange(start, stop)) + 2
        total += (part.reshape(stop - start, -1) ** 2).sum(1) @ rows
    return float(np.sqrt(total / max(int(np.prod(shape)), 1)))


def verdict(results: list[dict[str, Any]]) -> str:
    """What was promised of one job, and whether it holds."""
    found = {result["contender"]: result for result in results}
    ours = found.get(OURS)
    if ours is None or len(found) < 2:
        return ""
    others = [result for name, result in found.items() if name != OURS]
    checks = []
    if HAND in found:
        ratio = ours["cpu"] / found[HAND]["cpu"]
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


def markdown(results: list[dict[str, Any]]) -> str:
    """A table of CPU seconds and of the memory of a plan and of the loop by hand."""
    heads = ["job", *(f"{name}, CPU s" for name in IMPORTS)]
    heads += [f"{OURS}, MB", f"{HAND}, MB", ""]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * 8 + "---|"]
    for job in dict.fromkeys(result["job"] for result in results):
        found = {each["contender"]: each for each in results if each["job"] == job}
        cells = [f"{found[k]['cpu']:.2f}" if k in found else "" for k in IMPORTS]
        ours, hand = found[OURS], found[HAND]
        memory = [f"{each['megabytes']:.0f}" for each in (ours, hand)]
        words = [
            f"{what} {'ok' if ours[key] <= limit * hand[key] else 'MISS'}"
            for what, key, limit in (
                ("CPU", "cpu", LIMIT_HAND),
                ("memory", "megabytes", 1),
            )
        ]
        lines.append("| " + " | ".join([job, *cells, *memory, ", ".join(words)]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field")
    parser.add_argument("--gb", type=float, default=0.1, help="of all arrays of a job")
    parser.add_argument("--jobs", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--only", nargs="+", default=list(IMPORTS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path, help="shows what --json wrote")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "JOB", "FOLDER"))
    options = parser.parse_args()
    if options.one:
        contender, name, folder = options.one
        print(json.dumps(measure(contender, name, pathlib.Path(folder))))
        return 0
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return 0
    found = []
    heads = f"{'wall s':>8}{'CPU s':>8}{'MB':>7}{'read':>8}{'written':>8}"
    print(f"{'job':23}{'contender':13}{heads}")
    for name in options.jobs:
        with tempfile.TemporaryDirectory() as parent:
            folder = pathlib.Path(parent) / "arrays"
            folder.mkdir()
            TASKS[name].create(folder, options.gb)
            results = list(_run(name, folder, options.only))
        print(f"    {verdict(results)}", flush=True)
        found += results
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


def _run(name: str, folder: pathlib.Path, only: list[str]) -> Iterator[dict[str, Any]]:
    for contender in only:
        if importlib.util.find_spec(IMPORTS[contender][0].split(".")[0]) is None:
            continue
        forget(folder)
        command = [sys.executable, "-m", "benchmarks.field", "--one"]
        done = subprocess.run(
            [*command, contender, name, str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
            print(f"{name:23}{contender:13} did not run: {reason}", flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:23}{contender:13}{result['wall']:8.2f}{result['cpu']:8.2f}"
            f"{result['megabytes']:7.0f}{result['read']:8.0f}{result['written']:8.0f}",
            flush=True,
        )
        yield result


if __name__ == "__main__":
    sys.exit(main())
