"""A call with a psum over two processes: `python -m benchmarks.process_rows`.

It starts the processes. Both run all contenders, in the same order, as each call needs
both of them; the times are those of the first process.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from benchmarks import harness
from benchmarks.harness import OURS, Benchmark, Contender

PMAP = "jax.pmap"
SHARD_MAP = "jit(shard_map)"
ROOT = str(pathlib.Path(__file__).parent.parent)
PROCESSES = 2
LENGTH = 1 << 18  # float32: 1 MB for each device.


def step(x: Any) -> Any:
    return jnp.tanh(x) + lax.psum(x, "i")


def until_ready(fun: Callable, x: Any) -> Contender:
    x = jax.block_until_ready(fun(x))  # Results of its own kind, as in a loop.
    return Contender(lambda: jax.block_until_ready(fun(x)))


def with_local_data() -> dict[str, Contender]:
    """Each process passes and gets its own rows. Run in every process."""
    local = np.ones((jax.local_device_count(), LENGTH), np.float32)
    return {
        OURS: until_ready(sm.spmap(step, "i"), local),
        PMAP: until_ready(jax.pmap(step, "i"), local),
    }


def with_global_arrays() -> dict[str, Contender]:
    """All processes pass and get one array. Run in every process."""
    mesh = sm.make_mesh({"i": jax.device_count()}, jax.devices())
    by_hand = jax.jit(
        jax.shard_map(
            lambda x: step(x[0])[None],
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        )
    )
    local = np.ones((jax.local_device_count(), LENGTH), np.float32)
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), local)
    return {
        OURS: until_ready(sm.spmap(step, "i"), whole),
        SHARD_MAP: until_ready(by_hand, whole),
    }


@dataclass(frozen=True)
class AcrossProcesses(Benchmark):
    """Runs its contenders in processes of its own, all of them in each."""

    devices: int = 1

    def sample(self, repeats: int) -> Mapping[str, Sequence[float]]:
        with tempfile.TemporaryDirectory() as folder:
            samples = pathlib.Path(folder) / "samples.json"
            command = [
                *(sys.executable, "-m", "shardmap", "run", "-n", str(PROCESSES)),
                *("--devices-per-process", str(self.devices)),
                *(__file__, self.contenders.__name__, str(repeats), str(samples)),
            ]
            # The script is found by its path, but imports this package.
            paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
            subprocess.run(command, env=environment, check=True)
            return json.loads(samples.read_text())


BENCHMARKS = [
    AcrossProcesses(
        name=f"psum of 1 MB, {PROCESSES} processes, {devices} dev each, {of}",
        measures="the call until its result is ready",
        contenders=contenders,
        limits={peer: 1.05},
        repeats=300,
        devices=devices,
    )
    for devices in (1, 2)
    for of, contenders, peer in (
        ("local", with_local_data, PMAP),
        ("global", with_global_arrays, SHARD_MAP),
    )
]


def in_process(arguments: Sequence[str]) -> None:
    """What each process runs."""
    name, repeats, path = arguments
    contenders: Callable[[], dict[str, Contender]] = globals()[name]
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize()
    samples = harness.interleave(contenders(), int(repeats))
    if jax.process_index() == 0:
        pathlib.Path(path).write_text(json.dumps(samples))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        in_process(sys.argv[1:])
    else:
        print(harness.table([harness.measure(each) for each in BENCHMARKS]))
