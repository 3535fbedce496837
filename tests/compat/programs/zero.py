"""Momentum cut over the devices, weights whole, as ZeRO in 2023: pjit and None."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pjit import pjit
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

rng = np.random.RandomState(0)
params, momentum = rng.randn(8, 4).astype("f"), np.zeros((8, 4), "f")
batch = rng.randn(16, 8).astype("f")


def step(params, momentum, batch):
    gradient = jax.grad(lambda w: jnp.tanh(batch @ w).mean())(params)
    momentum = 0.9 * momentum + gradient
    return params - momentum, momentum


with Mesh(np.array(jax.devices()), ("dp",)):
    update = pjit(
        step,
        in_shardings=(None, P("dp"), P("dp")),
        out_shardings=(None, P("dp")),
    )
    for _ in range(3):
        params, momentum = update(params, momentum, batch)
whole = params.is_fully_replicated, momentum.is_fully_replicated
saved = {"first": params[0], "total": params.sum(), "momentum": momentum.sum()}
np.savez(sys.argv[1], whole=whole, **saved)
