"""Time shardmap against JAX, print a table of medians, and write it as JSON.

With --plot or --docs nothing is run: they draw what the last run has written.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Sequence

import jax

import shardmap
from benchmarks import harness, plot, rows

RESULTS = pathlib.Path(__file__).parent / "results.json"
DOCS = pathlib.Path(__file__).parent.parent / "docs"
DEVICES = 8


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="those with NAME in their name")
    parser.add_argument(
        "--repeats", type=positive, help="how often each contender runs"
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, default=RESULTS)
    parser.add_argument(
        "--plot",
        metavar="FILE",
        nargs="?",
        const=RESULTS.with_suffix(".svg"),
        type=pathlib.Path,
        help="draw the stored results as a picture, .svg or .png",
    )
    parser.add_argument(
        "--docs",
        metavar="FOLDER",
        nargs="?",
        const=DOCS,
        type=pathlib.Path,
        help="put the stored results into the docs: benchmarks.json, .svg and .md",
    )
    options = parser.parse_args(arguments)
    if options.plot or options.docs:
        if not options.json.exists():
            parser.error(
                f"there is no {options.json}: run `python -m benchmarks` first"
            )
        data = json.loads(options.json.read_text())
        if options.plot:
            plot.draw(data, options.plot)
            print(f"Drawn to {options.plot}")
        if options.docs:
            plot.write_docs(data, options.docs)
            print(f"Written to {options.docs}")
        return 0
    chosen = [b for b in rows.BENCHMARKS if (options.only or "") in b.name]
    if not chosen:
        names = "; ".join(b.name for b in rows.BENCHMARKS)
        parser.error(f"no benchmark has {options.only!r} in its name: {names}")

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    versions = versions_here()
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    results = []
    for number, benchmark in enumerate(chosen, 1):
        print(
            f"[{number}/{len(chosen)}] {benchmark.name}: {benchmark.measures}",
            flush=True,
        )
        results.append(harness.measure(benchmark, options.repeats))
    print()
    print(harness.table(results))
    options.json.write_text(json.dumps(harness.as_json(results, versions), indent=2))
    print(f"\nWritten to {options.json}")
    return 0


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def versions_here() -> dict[str, str]:
    return {
        "shardmap": shardmap.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
