"""Steps with the weights whole on each host, as in T5X of 2021: global_arg_shapes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

count = jax.device_count()
rng = np.random.RandomState(0)
params = {"w": rng.randn(6, 4).astype("f"), "b": np.zeros(4, "f")}
shapes = jax.tree_map(np.shape, params)
batches = rng.randn(3, count, 5, 6).astype("f")


def step(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch @ params["w"] + params["b"])
        return lax.pmean((hidden**2).mean(), "batch")

    value, gradient = jax.value_and_grad(loss)(params)
    gradient = lax.pmean(gradient, "batch")
    return jax.tree_map(lambda p, g: p - 0.5 * g, params, gradient), value


p_step = jax.pmap(
    step,
    axis_name="batch",
    in_axes=(None, 0),
    out_axes=(None, 0),
    donate_argnums=(0,),
    global_arg_shapes=(shapes, None),
    axis_size=count,
)
losses = []
for batch in batches:
    params, value = p_step(params, batch)
    losses.append(value[0])
np.savez(sys.argv[1], losses=losses, b=params["b"], total=params["w"].sum())
