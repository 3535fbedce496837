"""Old programs: unedited `jax.pmap` code where `compat.install` gives the old names."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardmap as sm
from benchmarks.harness import OURS, Benchmark, Contender
from shardmap import compat

PMAP = "jax.pmap"
STEPS = 10
Tree = dict[str, Any]


def training_step(pmap: Callable[..., Any], leaves: int) -> Callable[..., Any]:
    """A step of gradient descent on a tree of parameters, with a mean over devices."""

    @functools.partial(pmap, axis_name="i", donate_argnums=0)
    def step(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        def loss(params: Tree) -> jax.Array:
            weights = sum(params[f"leaf {k}"] for k in range(leaves))
            return ((jnp.tanh(batch["x"]) @ weights - batch["y"]) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        gradient = jax.lax.pmean(gradient, "i")
        updated = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)
        return updated, jax.lax.pmean(value, "i")

    return step


def loop(leaves: int, logs: bool) -> dict[str, Contender]:
    """A loop of steps; it logs ``loss[0]`` of each, or waits for it."""
    random = np.random.default_rng(0)
    batch = {
        "x": random.standard_normal((8, 16, 32), np.float32),
        "y": random.standard_normal((8, 16, 4), np.float32),
    }
    steps = {PMAP: training_step(jax.pmap, leaves)}
    compat.install()
    steps[OURS] = training_step(jax.pmap, leaves)
    compat.uninstall()

    def run(name: str, params: Tree) -> list[float]:
        losses = []
        for _ in range(STEPS):
            params, loss = steps[name](params, batch)
            losses.append(float(loss[0]) if logs else jax.block_until_ready(loss))
        return losses

    def prepare(name: str) -> tuple[str, Tree]:
        if name == OURS:
            compat.install()
        host = {f"leaf {k}": np.ones((8, 32, 4), np.float32) for k in range(leaves)}
        params = jax.device_put(host, sm.pmap_sharding((8, 32, 4)))
        return name, jax.block_until_ready(params)

    return {
        name: Contender(
            run,
            prepare=functools.partial(prepare, name),
            finish=lambda _: compat.uninstall(),
        )
        for name in steps
    }


BENCHMARKS = [
    Benchmark(
        name=f"old loop, {leaves} leaves, {'logs loss[0]' if logs else 'waits'}, 8 dev",
        measures=f"{STEPS} donated steps with pmean, unedited, after compat.install()",
        contenders=functools.partial(loop, leaves, logs),
        limits={PMAP: 1 / 0.95},
        repeats=20,
    )
    for leaves, logs in ((2, True), (100, True), (100, False))
]
