"""What it takes until a program can begin: imports, each in a process of its own.

Python keeps the bytecode of what it has compiled, as it does for what is installed.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.harness import OURS, Benchmark, Contender, interleave

ROOT = pathlib.Path(__file__).parent.parent
JAX = "import jax"
MAPS = "import shardmap as sm; sm.spmap"
ALL = f"{MAPS}, sm.mesh_map, sm.sharded_jit, sm.plan, sm.explain"
TIMED = """
import time
start = time.perf_counter()
{}
print(time.perf_counter() - start)
"""


def seconds(program: str) -> float:
    """How long a program takes in a new process, but for the start of Python."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", TIMED.format(program)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


class InNewProcesses(Benchmark):
    """Its contenders tell how long they took."""

    def sample(self, repeats: int) -> Mapping[str, Sequence[float]]:
        told: dict[str, list[float]] = {}
        timed = {}
        for name, contender in self.contenders().items():
            told[name] = []
            timed[name] = dataclasses.replace(contender, finish=told[name].append)
        interleave(timed, repeats)
        # The first one wrote the bytecode.
        return {name: times[1:] for name, times in told.items()}


def against_jax(program: str) -> dict[str, Contender]:
    programs = {OURS: program, JAX: JAX}
    return {
        name: Contender(functools.partial(seconds, text))
        for name, text in programs.items()
    }


BENCHMARKS = [
    InNewProcesses(
        name="import, for a map",
        measures=MAPS,
        contenders=lambda: against_jax(MAPS),
        limits={JAX: 1.15},
        repeats=20,
    ),
    InNewProcesses(
        name="import, plan and explain too",
        measures=ALL,
        contenders=lambda: against_jax(ALL),
        repeats=20,
    ),
]
