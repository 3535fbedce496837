"""Benchmarks of nested maps, gradients, long axes, and blocks on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from benchmarks.harness import OURS, Benchmark, Contender
from shardmap import demo

SHARD_MAP = "jit(shard_map)"
VMAP = "jit(vmap), sharded input"
LAX_MAP = "lax.map on one device"


def on_devices(x: Any, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def until_ready(fun: Callable, *args: Any) -> Contender:
    jax.block_until_ready(fun(*args))
    return Contender(lambda: jax.block_until_ready(fun(*args)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# Nested maps


def nested() -> dict[str, Contender]:
    mesh = sm.make_mesh({"data": 2, "model": 4})

    def body(x):
        return jnp.tanh(x) + lax.pmean(x, "model") * lax.psum(x, ("data", "model"))

    mapped = sm.spmap(sm.spmap(body, "model"), "data")
    by_hand = jax.jit(
        jax.shard_map(
            lambda x: body(x[0, 0])[None, None],
            mesh=mesh,
            in_specs=P("data", "model"),
            out_specs=P("data", "model"),
            check_vma=False,
        )
    )
    x = on_devices(normal(2, 4, 1024), mesh, "data", "model")
    return {OURS: until_ready(mapped, x), SHARD_MAP: until_ready(by_hand, x)}


# The gradient of the demo's loss, taken outside the map


def gradient() -> dict[str, Contender]:
    rng = np.random.default_rng(0)
    mesh = sm.make_mesh({"batch": 8})
    images = on_devices(normal(8, 16, 64), mesh, "batch")
    labels = on_devices(rng.integers(10, size=(8, 16), dtype=np.int32), mesh, "batch")
    parameters = on_devices(demo.initial_state().params, mesh)

    def elements(parameters, images, labels):
        return demo.loss_function(parameters, images[0], labels[0])[None]

    mapped = sm.spmap(demo.loss_function, in_axes=(None, 0, 0))
    by_hand = jax.shard_map(
        elements,
        mesh=mesh,
        in_specs=(P(), P("batch"), P("batch")),
        out_specs=P("batch"),
        check_vma=False,
    )
    return {
        name: until_ready(
            jax.jit(jax.grad(lambda *args, losses=losses: losses(*args).mean())),
            parameters,
            images,
            labels,
        )
        for name, losses in ((OURS, mapped), (SHARD_MAP, by_hand))
    }


# An axis that is longer than there are devices


def step(x):
    for _ in range(4):
        x = jnp.sin(x) * 1.1 + x
    return x


def long_axis(size: int, width: int) -> dict[str, Contender]:
    x = on_devices(normal(size, width), sm.make_mesh({"i": 8}), "i")
    one = jax.device_put(x, jax.devices()[0])
    return {
        OURS: until_ready(sm.spmap(step), x),
        VMAP: until_ready(jax.jit(jax.vmap(step)), x),
        LAX_MAP: until_ready(
            jax.jit(lambda x: lax.map(step, x, batch_size=size // 8)), one
        ),
    }


def batch_sizes() -> dict[str, Contender]:
    """A layer that is wide in the middle, which only blocks of elements pay for."""
    x = on_devices(normal(1024, 128), sm.make_mesh({"i": 8}), "i")
    w = normal(128, 4096)

    def wide(x):
        return jnp.tanh(x @ w) @ w.T

    contenders = {}
    for batch_size in (None, 64, 8, 1):
        mapped = sm.spmap(wide, batch_size=batch_size)
        memory = mapped.lower(x).compile().memory_analysis().temp_size_in_bytes
        name = f"batch_size={batch_size}, {memory // 1024:,} KiB of temporaries"
        contenders[OURS if batch_size is None else name] = until_ready(mapped, x)
        if batch_size is None:
            contenders[name] = contenders[OURS]
    return contenders


def long_psum() -> dict[str, Contender]:
    mesh = sm.make_mesh({"i": 8})
    x = on_devices(normal(1024, 4096), mesh, "i")

    def two_levels(block):
        return lax.psum(block.sum(0), "i")

    by_hand = jax.shard_map(
        two_levels, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False
    )
    mapped = sm.spmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)
    return {OURS: until_ready(mapped, x), SHARD_MAP: until_ready(jax.jit(by_hand), x)}


# Blocks, and the partitioner


def layer(x, w):
    return lax.psum(jnp.tanh(x @ w), "model")


def blocks() -> dict[str, Contender]:
    mesh = sm.make_mesh({"data": 4, "model": 2})
    x = on_devices(normal(256, 512), mesh, "data", "model")
    w = on_devices(normal(512, 256), mesh, "model")
    mapped = sm.mesh_map(
        layer, mesh, ({"data": 0, "model": 1}, {"model": 0}), {"data": 0}
    )
    by_hand = jax.jit(
        jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(P("data", "model"), P("model")),
            out_specs=P("data"),
            check_vma=False,
        )
    )
    return {OURS: until_ready(mapped, x, w), SHARD_MAP: until_ready(by_hand, x, w)}


def partitioner() -> dict[str, Contender]:
    x = on_devices(normal(64, 4096), sm.make_mesh({"i": 8}), "i")

    def body(x):
        return x - lax.pmean(x, "i")

    return {
        OURS: until_ready(sm.spmap(body, "i", lowering="spmd"), x),
        VMAP: until_ready(jax.jit(jax.vmap(body, axis_name="i")), x),
        "lowering='manual'": until_ready(sm.spmap(body, "i"), x),
    }


BENCHMARKS = [
    Benchmark(
        name="nested maps, 2 x 4 dev",
        measures="spmap in spmap against one shard_map over a 2-D mesh",
        contenders=nested,
        limits={SHARD_MAP: 1.05},
        repeats=300,
    ),
    Benchmark(
        name="gradient of the demo's loss, 8 dev",
        measures="jit(grad(mean of a map))",
        contenders=gradient,
        limits={SHARD_MAP: 1.05},
        repeats=300,
    ),
    Benchmark(
        name="axis of 1,024, 8 dev",
        measures="elements of 1,024 numbers, 128 on each device",
        contenders=functools.partial(long_axis, 1024, 1024),
        limits={VMAP: 1.05},
        repeats=100,
    ),
    Benchmark(
        name="axis of 100,000, 8 dev",
        measures="elements of 16 numbers, 12,500 on each device",
        contenders=functools.partial(long_axis, 100_000, 16),
        limits={VMAP: 1.05},
        repeats=100,
    ),
    Benchmark(
        name="batch_size, axis of 1,024",
        measures="vectorised parts of a block, one after the other",
        contenders=batch_sizes,
        repeats=20,
    ),
    Benchmark(
        name="psum over an axis of 1,024",
        measures="against a local sum and a psum, by hand",
        contenders=long_psum,
        limits={SHARD_MAP: 1.05},
        repeats=100,
    ),
    Benchmark(
        name="mesh_map, 4 x 2 dev",
        measures="a layer cut over both mesh axes",
        contenders=blocks,
        limits={SHARD_MAP: 1.05},
        repeats=300,
    ),
    Benchmark(
        name="lowering='spmd', axis of 64",
        measures="one program for the partitioner",
        contenders=partitioner,
        repeats=100,
    ),
]
