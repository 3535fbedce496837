"""Three training steps of a transformer, as they are written for `jax.jit`.

Data parallel, fully sharded, and Megatron's tensor parallelism with its sequence
parallelism; a scan over layers, which are computed again in the gradient.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

LAYERS, BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 4, 32, 256, 512, 8, 2048
SIZES = {
    "query": (WIDTH, HEADS, WIDTH // HEADS),
    "key": (WIDTH, HEADS, WIDTH // HEADS),
    "value": (WIDTH, HEADS, WIDTH // HEADS),
    "out": (HEADS, WIDTH // HEADS, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
WEIGHTS = LAYERS * sum(map(math.prod, SIZES.values()))
# The dimension of each weight that heads or hidden units are along, after that of
# layers, and another one, of width.
OF_MODEL = {"query": 2, "key": 2, "value": 2, "out": 1, "up": 2, "down": 1}
OF_WIDTH = {"query": 1, "key": 1, "value": 1, "out": 3, "up": 1, "down": 2}


class Step(NamedTuple):
    """A step: the names of its mesh axes, what shards weights, and a sequence."""

    axes: tuple[str, ...]
    weights: dict[str, int] | None
    of: str | None
    sequence: str | None = None


DATA = Step(("data",), None, None)
FULLY = Step(("data",), OF_WIDTH, "data")
MEGATRON = Step(("data", "model"), OF_MODEL, "model", "model")


def program(step: Step, devices, sizes):
    """The step, and its arguments.

    Args:
      step: which.
      devices: those of a machine.
      sizes: of the mesh axes.
    """
    mesh = sm.make_mesh(dict(zip(step.axes, sizes, strict=True)), devices=devices)

    def sharding(*names):
        return NamedSharding(mesh, P(*names))

    def laid(x):  # Between attention and the hidden layer; scores of heads.
        return lax.with_sharding_constraint(x, sharding("data", step.sequence))

    def inside(x, *names):  # Of them: heads or hidden units.
        return lax.with_sharding_constraint(x, sharding("data", None, *names))

    def layer(x, w):
        w = {name: each.astype(jnp.bfloat16) for name, each in w.items()}
        y = inside(x)
        q, k, v = (
            inside(jnp.einsum("btd,dhk->bthk", y, w[n]), step.sequence)
            for n in ("query", "key", "value")
        )
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(laid(scores))
        mixed = inside(jnp.einsum("bhts,bshk->bthk", weights, v), step.sequence)
        x = laid(x + jnp.einsum("bthk,hkd->btd", mixed, w["out"]))
        hidden = jax.nn.gelu(inside(inside(x) @ w["up"], step.sequence))
        return laid(x + hidden @ w["down"]), None

    def loss(w, x):
        x, _ = lax.scan(jax.checkpoint(layer, prevent_cse=False), laid(x), w)
        return (x.astype(jnp.float32) ** 2).mean()

    def fun(w, x):
        slopes = jax.grad(loss)(w, x)
        return jax.tree.map(lambda w, slope: w - 0.1 * slope, w, slopes)

    w = {}
    for name, each in SIZES.items():
        names = [None] * (1 + len(each))
        if step.weights is not None:
            names[step.weights[name]] = step.of
        shape = (LAYERS, *each)
        w[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(*names))
    x = jax.ShapeDtypeStruct(
        (BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=sharding("data")
    )
    outs = jax.tree.map(lambda each: each.sharding, w)
    return jax.jit(fun, donate_argnums=0, out_shardings=outs), w, x
