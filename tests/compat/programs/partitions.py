"""A matrix product in partitions, alone and in a pmap, as in 2020: sharded_jit."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.sharded_jit import PartitionSpec as P
from jax.interpreters.sharded_jit import sharded_jit, with_sharding_constraint


def f(x, y):
    hidden = with_sharding_constraint(jnp.dot(x, y), P(1, 2))
    return jnp.tanh(hidden) + 1


x = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
y = np.ones((8, 8), np.float32) / 3
product = sharded_jit(f, in_parts=(P(2, 1), P(1, 2)), out_parts=P(2, 1))
z = product(x, y)
print([b.shape for b in z.device_buffers])
many = jax.pmap(product)(np.stack([x, 2 * x]), np.stack([y, y]))
np.savez(sys.argv[1], z=z, many=many, count=len(many.device_buffers))
