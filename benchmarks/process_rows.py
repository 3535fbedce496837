"""A call with a psum over two processes: `python -m benchmarks.process_rows`.

It starts the processes. Both run all contenders, in the same order, as each call needs
both of them; the times are those of the first process.
"""

import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from benchmarks import harness
from benchmarks.harness import OURS, Benchmark, Contender, Result
from shardmap.commands import run

PMAP = "jax.pmap"
SHARD_MAP = "jit(shard_map), global"
OURS_ON_GLOBAL = "shardmap, global"
PROCESSES = 2
LENGTH = 1 << 18  # float32: 1 MB for each device.


def step(x: Any) -> Any:
    return jnp.tanh(x) + lax.psum(x, "i")


def until_ready(fun: Callable, x: Any) -> Contender:
    x = jax.block_until_ready(fun(x))  # Results of its own kind, as in a loop.
    return Contender(lambda: jax.block_until_ready(fun(x)))


def contenders() -> dict[str, Contender]:
    """Run in every process."""
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
    mapped = sm.spmap(step, "i")
    rows = np.ones((jax.local_device_count(), LENGTH), np.float32)
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), rows)
    return {
        OURS: until_ready(mapped, rows),
        OURS_ON_GLOBAL: until_ready(sm.spmap(step, "i"), whole),
        PMAP: until_ready(jax.pmap(step, "i"), rows),
        SHARD_MAP: until_ready(by_hand, whole),
    }


def benchmark(devices: int) -> Benchmark:
    return Benchmark(
        name=f"psum of 1 MB, {PROCESSES} processes, {devices} dev each",
        measures="the call until its result is ready; each process passes its rows",
        contenders=contenders,
        limits={SHARD_MAP: 1.05, PMAP: 1.0},
        repeats=300,
    )


BENCHMARKS = {devices: benchmark(devices) for devices in (1, 2)}


def measure(devices: int, repeats: int | None = None) -> Result:
    """Starts processes with so many devices each, and gives what they measured."""
    measured = BENCHMARKS[devices]
    with tempfile.TemporaryDirectory() as folder:
        samples = pathlib.Path(folder) / "samples.json"
        code = run.main(
            [
                *("-n", str(PROCESSES), "--devices-per-process", str(devices)),
                *(__file__, str(devices), str(repeats or measured.repeats)),
                str(samples),
            ]
        )
        if code:
            raise RuntimeError(f"{measured.name}: the processes ended with {code}")
        return Result(measured, json.loads(samples.read_text()))


def measure_all(repeats: int | None = None) -> list[Result]:
    return [measure(devices, repeats) for devices in BENCHMARKS]


def in_process(arguments: Sequence[str]) -> None:
    """What each process runs."""
    devices, repeats, path = arguments
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize()
    samples = harness.measure(BENCHMARKS[int(devices)], int(repeats)).samples
    if jax.process_index() == 0:
        pathlib.Path(path).write_text(json.dumps(samples))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        in_process(sys.argv[1:])
    else:
        print(harness.table(measure_all()))
