"""Runs the scoreboard of the field.

    python -m benchmarks.field --gb 0.1

Each contender runs twice in a fresh process on arrays in files, which the system does
not hold in memory at first. The table has wall and CPU seconds of both calls. The first
one includes planning and compilation, but no imports. It also has the peak of anonymous
memory (RssAnon), what a plan says it takes, and the bytes that the first call had the
device of the files read and write. cubed is tried where it is installed.
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

from benchmarks.field import analyses, descent, stored, sums
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

LIMIT_HAND, LIMIT_BEST, LIMIT_PLANNING = 1.1, 1.5, 0.15
TASKS = {**sums.TASKS, **stored.TASKS, **descent.TASKS, **analyses.TASKS}
IMPORTS = {
    OURS: ("jax.numpy", "shardmap.planning.plan"),
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
        ready = TASKS[name].contenders[contender](folder, out)
        planning = time.perf_counter() - start
        ready.run()
        wall = time.perf_counter() - start
        now, after = resource.getrusage(resource.RUSAGE_SELF), traffic()
        start = time.perf_counter()
        result = ready.run()
        again = time.perf_counter() - start
        last = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        stop.set()
        watcher.join()
    found = {
        "job": name,
        "contender": contender,
        "wall": wall,
        "cpu": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "again": again,
        "again_cpu": last.ru_utime + last.ru_stime - now.ru_utime - now.ru_stime,
        "planning": planning if contender == OURS else None,
        "megabytes": max(peak[0], anonymous_bytes()) / 1e6,
        "told": ready.plan.peak_bytes / 1e6 if ready.plan else None,
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
    checks = []

    def check(what: str, number: float, limit: float) -> None:
        word = "ok" if number <= limit else "MISS"
        checks.append(f"{what.format(number)}: {word}")

    others = [found[name] for name in (NUMPY, DASK, CUBED) if name in found]
    for call, key in (("first", "wall"), ("second", "again")):
        if HAND in found:
            ratio = ours[key] / found[HAND][key]
            check(f"{call} call {{:.2f}} x by hand", ratio, LIMIT_HAND)
        if others:
            ratio = ours[key] / min(other[key] for other in others)
            check(f"{call} call {{:.2f}} x best other", ratio, LIMIT_BEST)
    check("planning {:.2f} s", ours["planning"], LIMIT_PLANNING)
    norms = [result["norm"] for result in results]
    if max(norms) - min(norms) > 1e-3 * max(norms):
        checks.append(f"RESULTS DIFFER: {norms}")
    return "; ".join(checks)


def markdown(results: list[dict[str, Any]]) -> str:
    """A table of CPU seconds of the first call, the peaks in MB, told and measured, and
    the second call against the loop by hand and the best other tool."""
    kept = [name for name in IMPORTS if name != CUBED]
    heads = ["job", *kept, "told", *(f"{name}, MB" for name in kept)]
    heads += ["to the loop", "to the best other"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for job in dict.fromkeys(result["job"] for result in results):
        found = {each["contender"]: each for each in results if each["job"] == job}
        cells = [f"{found[k]['cpu']:.2f}" if k in found else "" for k in kept]
        cells += [f"{found[OURS]['told']:.0f}"]
        cells += [f"{found[k]['megabytes']:.0f}" if k in found else "" for k in kept]
        for names in ([HAND], [NUMPY, DASK]):
            others = [found[name]["again"] for name in names if name in found]
            ratio = found[OURS]["again"] / min(others) if others else None
            cells.append(f"{ratio:.2f}" if ratio else "")
        lines.append(f"| {job} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field")
    parser.add_argument("--gb", type=float, default=0.1, help="of all arrays of a job")
    parser.add_argument("--jobs", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--only", nargs="+", default=list(IMPORTS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path, help="shows what --json wrote")
    parser.add_argument("--plans", action="store_true", help="shows plans, runs none")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "JOB", "FOLDER"))
    options = parser.parse_args()
    if options.one:
        contender, name, folder = options.one
        print(json.dumps(measure(contender, name, pathlib.Path(folder))))
        return 0
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return 0
    if options.plans:
        for name in options.jobs:
            print(f"{name}\n{_plan(name, options.gb)}\n", flush=True)
        return 0
    found = []
    heads = f"{'wall s':>8}{'CPU s':>8}{'again s':>8}{'CPU s':>8}{'MB':>7}{'told':>7}"
    heads += f"{'read':>8}{'written':>8}"
    print(f"{'job':25}{'contender':13}{heads}")
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


def _plan(name: str, gigabytes: float) -> str:
    """What a plan says of its shards, stages and reads."""
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "arrays"
        folder.mkdir()
        TASKS[name].create(folder, gigabytes)
        out = folder.with_name("out")
        return str(TASKS[name].contenders[OURS](folder, out).plan)


def _run(name: str, folder: pathlib.Path, only: list[str]) -> Iterator[dict[str, Any]]:
    for contender in only:
        if contender not in TASKS[name].contenders:
            continue
        if importlib.util.find_spec(IMPORTS[contender][0].split(".")[0]) is None:
            continue
        forget(folder)
        command = [sys.executable, "-m", "benchmarks.field", "--one"]
        done = subprocess.run(
            [*command, contender, name, str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
            print(f"{name:25}{contender:13} did not run: {reason}", flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name:25}{contender:13}{result['wall']:8.2f}{result['cpu']:8.2f}"
            f"{result['again']:8.2f}{result['again_cpu']:8.2f}"
            f"{result['megabytes']:7.0f}{result['told'] or 0:7.0f}"
            f"{result['read']:8.0f}{result['written']:8.0f}",
            flush=True,
        )
        yield result


if __name__ == "__main__":
    sys.exit(main())
