"""The benchmarks themselves: each pits shardmap against what JAX offers."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from benchmarks import (
    idiom_rows,
    import_rows,
    map_rows,
    old_rows,
    placement_rows,
    plan_rows,
    planning_rows,
    process_rows,
)
from benchmarks.harness import OURS, Benchmark, Contender
from shardmap import demo

PMAP = "jax.pmap"
SHARD_MAP = "jit(shard_map)"
DEVICE_PUT = "device_put + jit(shard_map)"
NAMED_SHARDING = "NamedSharding"


def mesh_of(device_count: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:device_count]), "i")


def hand_written(fun: Callable, device_count: int) -> Callable:
    """What a user of today's JAX writes for `pmap(fun, 'i')`."""

    def block(*xs):
        return fun(*(x[0] for x in xs))[None]

    return jax.jit(
        jax.shard_map(
            block,
            mesh=mesh_of(device_count),
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        )
    )


def three_ways(fun: Callable, device_count: int) -> dict[str, Callable]:
    devices = jax.devices()[:device_count]
    return {
        OURS: sm.spmap(fun, axis_name="i", devices=devices),
        SHARD_MAP: hand_written(fun, device_count),
        PMAP: jax.pmap(fun, axis_name="i", devices=devices),
    }


# Dispatch: the time until a call returns, its arguments in place, with little to do.


def add_up(*xs):
    return functools.reduce(operator.add, xs) + 1


def dispatch(argument_count: int, device_count: int) -> Benchmark:
    return Benchmark(
        name=f"dispatch, {argument_count} arg, {device_count} dev",
        measures="the call until it returns; arguments already on their devices",
        contenders=lambda: dispatch_contenders([argument_count], device_count),
        limits={SHARD_MAP: 1.03, PMAP: 1.0},
    )


def dispatch_contenders(
    argument_counts: Sequence[int], device_count: int
) -> dict[str, Contender]:
    """Calls with these numbers of arguments, one after the other, again and again."""
    # Each gets results of its own kind as arguments, as in a training loop, but not of
    # its own: the function has then been called with nothing but what is timed.
    makers = three_ways(add_up, device_count)
    host = np.ones((device_count, 4), np.float32)
    made = {}
    for name, mapped in three_ways(add_up, device_count).items():
        xs = [makers[name](host) for _ in range(max(argument_counts))]
        calls = itertools.cycle([tuple(xs[:count]) for count in argument_counts])
        for _ in argument_counts:
            jax.block_until_ready(mapped(*next(calls)))
        made[name] = Contender(
            mapped,
            prepare=lambda calls=calls: next(calls),
            finish=jax.block_until_ready,
        )
    return made


# NumPy input: the time until 2 MB from the host have been used.


def numpy_input() -> dict[str, Contender]:
    x = np.random.default_rng(0).standard_normal((8, 1 << 16), dtype=np.float32)
    ways = three_ways(jnp.sum, 8)
    sharding = NamedSharding(mesh_of(8), P("i"))
    by_hand = ways[SHARD_MAP]
    ways[DEVICE_PUT] = lambda x: by_hand(jax.device_put(x, sharding))
    return {
        name: Contender(
            lambda mapped=mapped: jax.block_until_ready(mapped(x)),
        )
        for name, mapped in ways.items()
    }


# First call: trace, lower and compile the demo's training step, which JAX has not seen.


def first_call() -> dict[str, Contender]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8, 16, 64), dtype=np.float32)
    labels = rng.integers(10, size=(8, 16), dtype=np.int32)
    arguments = (demo.initial_state(), images, labels)
    mapping = {"axis_name": "batch", "in_axes": (None, 0, 0), "out_axes": None}

    def new_step():
        return lambda *args: demo.train_step.__wrapped__(*args)

    def shard_mapped():
        step = new_step()
        return jax.jit(
            jax.shard_map(
                lambda state, images, labels: step(state, images[0], labels[0]),
                mesh=jax.sharding.Mesh(np.array(jax.devices()), "batch"),
                in_specs=(P(), P("batch"), P("batch")),
                out_specs=P(),
                check_vma=False,
            )
        )

    makers = {
        OURS: lambda: sm.spmap(new_step(), **mapping),
        SHARD_MAP: shard_mapped,
        PMAP: lambda: jax.pmap(new_step(), **mapping),
    }
    return {
        name: Contender(
            lambda mapped: mapped.lower(*arguments).compile(),
            prepare=lambda make=make: (make(),),
        )
        for name, make in makers.items()
    }


# The model: a spec over more devices than this machine could pretend to have.


@dataclass(eq=False)
class FakeDevice:
    """As much of a device as a mesh and its indices look at."""

    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0
    client: None = None


SIDE = 64


def new_specs() -> Iterator[sm.ShardingSpec]:
    while True:
        yield sm.ShardingSpec(
            (sm.Chunked(SIDE), sm.Chunked(SIDE)), (sm.ShardedAxis(1), sm.ShardedAxis(0))
        )


def new_named_shardings() -> Iterator[NamedSharding]:
    """Equal layouts under ever new names, which JAX's caches have not seen."""
    devices = np.array([FakeDevice(number) for number in range(SIDE * SIDE)])
    for number in itertools.count():
        names = (f"a{number}", f"b{number}")
        mesh = jax.sharding.Mesh(devices.reshape(SIDE, SIDE), names)
        yield NamedSharding(mesh, P(*reversed(names)))


def against_named_sharding(
    ours: Callable[[sm.ShardingSpec], Any], theirs: Callable[[NamedSharding], Any]
) -> dict[str, Contender]:
    specs, named_shardings = new_specs(), new_named_shardings()
    return {
        OURS: Contender(ours, prepare=lambda: (next(specs),)),
        NAMED_SHARDING: Contender(theirs, prepare=lambda: (next(named_shardings),)),
    }


SHAPE = (SIDE * 4, SIDE * 2)


def indices() -> dict[str, Contender]:
    return against_named_sharding(
        lambda spec: spec.indices(SHAPE),
        lambda sharding: sharding.devices_indices_map(SHAPE),
    )


def proto() -> dict[str, Contender]:
    return against_named_sharding(
        lambda spec: spec.sharding_proto(),
        # JAX has no public way from a NamedSharding to its proto.
        lambda sharding: sharding._to_xla_hlo_sharding(2).to_proto(),
    )


BENCHMARKS = [
    dispatch(1, 2),
    dispatch(1, 8),
    dispatch(100, 2),
    dispatch(100, 8),
    Benchmark(
        name="dispatch, 1 and 2 arg in turn, 8 dev",
        measures="as above, the same function called in two ways",
        contenders=lambda: dispatch_contenders([1, 2], 8),
    ),
    Benchmark(
        name="NumPy input, 2 MB, 8 dev",
        measures="the call until its result is ready; the argument is a NumPy array",
        contenders=numpy_input,
        limits={DEVICE_PUT: 1.1},
        repeats=300,
    ),
    Benchmark(
        name="first call, demo's step, 8 dev",
        measures="trace + lower + compile",
        contenders=first_call,
        limits={SHARD_MAP: 1.2},
        repeats=15,
    ),
    Benchmark(
        name="indices, 4,096 dev",
        measures="the index of every device, from a layout not seen before",
        contenders=indices,
        repeats=30,
    ),
    Benchmark(
        name="proto, 4,096 dev",
        measures="the OpSharding, from a layout not seen before",
        contenders=proto,
        repeats=100,
    ),
    *map_rows.BENCHMARKS,
    *placement_rows.BENCHMARKS,
    *old_rows.BENCHMARKS,
    *plan_rows.BENCHMARKS,
    *planning_rows.BENCHMARKS,
    *idiom_rows.BENCHMARKS,
    *process_rows.BENCHMARKS,
    *import_rows.BENCHMARKS,
]
