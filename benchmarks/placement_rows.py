"""Placement: copies onto all devices, and pieces back from one."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import shardmap as sm
from benchmarks.harness import OURS, Benchmark, Contender

INDEXING = "y[i]"
STACKING = "np.stack + device_put"
EACH = "device_put of each"
BROADCAST = "np.broadcast_to + device_put"
TREE_LEAVES = 50


def rows_on_devices(seed: int = 0) -> jax.Array:
    host = np.random.default_rng(seed).standard_normal((8, 64, 64), dtype=np.float32)
    return jax.device_put(host, sm.pmap_sharding(host.shape))


def tree_on_devices() -> dict[str, jax.Array]:
    return {f"leaf {k}": rows_on_devices(k) for k in range(TREE_LEAVES)}


def each_index(y: jax.Array) -> list[jax.Array]:
    return [y[i] for i in range(8)]


def pieces(
    make: Callable[[], Any], ours: Callable[[Any], Any], theirs: Callable[[Any], Any]
) -> Callable[[], dict[str, Contender]]:
    """Both give the same pieces of what `make` gives; the call is timed."""

    def contenders() -> dict[str, Contender]:
        whole = make()
        jax.tree.map(np.testing.assert_array_equal, ours(whole), theirs(whole))
        return {
            name: Contender(run, prepare=lambda: (whole,), finish=jax.block_until_ready)
            for name, run in ((OURS, ours), (INDEXING, theirs))
        }

    return contenders


def replicate_contenders() -> dict[str, Callable[[np.ndarray], jax.Array]]:
    devices = jax.local_devices()[:8]

    def stacked(x: np.ndarray) -> jax.Array:
        rows = np.stack([x] * len(devices))
        return jax.device_put(rows, sm.pmap_sharding(rows.shape, 0, devices))

    return {
        OURS: lambda x: sm.device_put_replicated(x, devices),
        STACKING: stacked,
    }


def sharded_put() -> dict[str, Contender]:
    """Batches of two leaves, one for each device, as arrays on the host."""
    devices = jax.local_devices()[:8]
    batch = {"x": np.ones((32, 64), np.float32), "y": np.ones(32, np.float32)}
    batches = [batch] * len(devices)
    cut = sm.pmap_sharding((len(devices),), 0, devices)

    def stacked(*leaves: np.ndarray) -> jax.Array:
        return jax.device_put(np.stack(leaves), cut)

    def one_by_one(*leaves: np.ndarray) -> jax.Array:
        put = [
            jax.device_put(leaf[None], device)
            for leaf, device in zip(leaves, devices, strict=True)
        ]
        shape = (len(devices), *leaves[0].shape)
        sharding = sm.pmap_sharding(shape, 0, devices)
        return jax.make_array_from_single_device_arrays(shape, sharding, put)

    ways = {
        OURS: lambda: sm.device_put_sharded(batches, devices),
        STACKING: lambda: jax.tree.map(stacked, *batches),
        EACH: lambda: jax.tree.map(one_by_one, *batches),
    }
    return {
        name: Contender(lambda put=put: jax.block_until_ready(put()))
        for name, put in ways.items()
    }


def replicated_tree() -> dict[str, Contender]:
    """Twenty small leaves on the host, as the parameters of a model."""
    devices = jax.local_devices()[:8]
    tree = {f"leaf {k}": np.ones((32, 64), np.float32) for k in range(20)}
    cut = sm.pmap_sharding((len(devices),), 0, devices)

    def broadcast() -> dict[str, jax.Array]:
        rows = {
            k: np.broadcast_to(x, (len(devices), *x.shape)) for k, x in tree.items()
        }
        return jax.device_put(rows, cut)

    ways = {
        OURS: lambda: sm.device_put_replicated(tree, devices),
        BROADCAST: broadcast,
    }
    return {
        name: Contender(lambda put=put: jax.block_until_ready(put()))
        for name, put in ways.items()
    }


VALUE = np.ones((1 << 20,), np.float32)


def replicate() -> dict[str, Contender]:
    return {
        name: Contender(lambda put=put: jax.block_until_ready(put(VALUE)))
        for name, put in replicate_contenders().items()
    }


def host_peak(put: Callable[[np.ndarray], jax.Array]) -> float:
    """The most host memory that NumPy holds at a time, in copies of the value."""
    tracemalloc.start()
    jax.block_until_ready(put(VALUE))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / VALUE.nbytes


def host_peaks() -> dict[str, float]:
    """The peak host memory of each way to replicate, in copies of the value."""
    return {name: host_peak(put) for name, put in replicate_contenders().items()}


CALLS = "the calls until they return"
BENCHMARKS = [
    Benchmark(
        name="shard_of, each of 8 dev",
        measures=CALLS,
        contenders=pieces(
            rows_on_devices, lambda y: [sm.shard_of(y, i) for i in range(8)], each_index
        ),
        limits={INDEXING: 1 / 20},
        repeats=50,
    ),
    Benchmark(
        name="unstack, 8 dev",
        measures=CALLS,
        contenders=pieces(rows_on_devices, sm.unstack, each_index),
        limits={INDEXING: 1 / 20},
        repeats=50,
    ),
    Benchmark(
        name=f"unreplicate, {TREE_LEAVES} leaves, 8 dev",
        measures=CALLS,
        contenders=pieces(
            tree_on_devices,
            sm.unreplicate,
            lambda tree: jax.tree.map(lambda y: y[0], tree),
        ),
        limits={INDEXING: 1 / 20},
        repeats=20,
    ),
    Benchmark(
        name="device_put_sharded, 2 leaves, 8 dev",
        measures="until all devices have their shard",
        contenders=sharded_put,
        limits={STACKING: 1.1, EACH: 1.0},
        repeats=200,
    ),
    Benchmark(
        name="replicated put, 20 leaves, 8 dev",
        measures="until all devices have their copies",
        contenders=replicated_tree,
        limits={BROADCAST: 1.1},
        repeats=200,
    ),
    Benchmark(
        name="replicated put, 4 MB, 8 dev",
        measures="until all devices have their copy",
        contenders=replicate,
        limits={STACKING: 1.0},
        repeats=50,
    ),
]


def main() -> None:
    """Prints the peaks: `python -m benchmarks.placement_rows`."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, copies in host_peaks().items():
        print(f"{name}: at most {copies:.2f} copies of the value in host memory")


if __name__ == "__main__":
    main()
