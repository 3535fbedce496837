"""What a cluster costs its client: `python -m benchmarks.cluster_rows`.

Shards of no work run on two workers of Dask. Scheduler and workers are other processes,
as on a cluster. Each number of shards is measured in a fresh process.
"""

import argparse
import contextlib
import importlib.metadata
import pathlib
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

import shardmap as sm

SHARDS = 100, 10_000, 100_000
WORKERS = 2
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- cluster -->\n", "<!-- end of cluster -->\n"
CLUSTER = f"""
import distributed
if __name__ == "__main__":
    cluster = distributed.LocalCluster(
        n_workers={WORKERS}, threads_per_worker=1, dashboard_address=":0"
    )
    print(cluster.scheduler_address, flush=True)
    input()
    cluster.close()
"""


@contextlib.contextmanager
def scheduler(folder: pathlib.Path) -> Iterator[str]:
    """The address of the scheduler of a cluster in another process."""
    script = folder / "cluster.py"
    script.write_text(CLUSTER)
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.communicate("\n")


def cpu() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def megabytes() -> float:
    """The peak of this process's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(address: str, folder: pathlib.Path, count: int) -> str:
    """One row of the table: run in a fresh process."""
    import distributed

    x = np.lib.format.open_memmap(folder / f"x{count}", "w+", np.float32, (count,))
    y = np.lib.format.open_memmap(folder / f"y{count}", "w+", np.float32, (count,))
    small = np.lib.format.open_memmap(folder / f"s{count}", "w+", np.float32, (4,))
    with distributed.Client(address) as client:
        # Imports, and the first connection of each worker.
        sm.plan(lambda x: x + 1, small, in_slices={0: 4}).run(small, executor=client)
        made = sm.plan(lambda x: x + 1, x, in_slices={0: count})
        before, used = megabytes(), cpu()
        made.run(x, out=y, executor=client)
        used, grown = cpu() - used, megabytes() - before
    assert (y == 1).all()
    milliseconds = f"{1e3 * used / count:.2f}"
    return f"| {count:,} | {milliseconds} | {before + grown:.0f} | {grown:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_rows")
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS)
    parser.add_argument("--docs", action="store_true", help=f"write into {PAGE.name}")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        address, folder, count = options.one
        print(measure(address, pathlib.Path(folder), int(count)))
        return 0
    lines = [
        "| shards | client's CPU, ms a shard | client, MB | of these for the run, MB |",
        "|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as name:
        with scheduler(pathlib.Path(name)) as address:
            for count in options.shards:
                command = [sys.executable, "-m", "benchmarks.cluster_rows"]
                command += ["--one", address, name, str(count)]
                row = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                lines.append(row.stdout.decode().strip())
                print(lines[-1], flush=True)
    versions = ", ".join(
        f"{each} {importlib.metadata.version(each)}" for each in ("jax", "distributed")
    )
    lines += ["", f"Measured with shardmap {sm.__version__}, {versions}, on two cores."]
    table = "\n".join(lines)
    print(table)
    if options.docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
