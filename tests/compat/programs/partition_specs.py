"""A step on a mesh, as in 2021: pjit with axis resources."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import PartitionSpec as P
from jax.experimental.maps import Mesh
from jax.experimental.pjit import pjit, with_sharding_constraint


def step(w, x):
    hidden = with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))
    return w - 0.1 * jax.grad(lambda w: (x @ w).sum())(w), hidden


update = pjit(
    step,
    in_axis_resources=(P(None, "model"), P("data")),
    out_axis_resources=(P(None, "model"), None),
)
w = np.ones((6, 4), np.float32)
x = np.arange(48, dtype=np.float32).reshape(8, 6) / 48
with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")):
    w, hidden = update(w, x)
np.savez(sys.argv[1], w=w, hidden=hidden)
