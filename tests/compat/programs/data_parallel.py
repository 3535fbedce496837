"""Training as it was written in 2019: stax, optimizers, pmap, and psum of gradients."""

import sys
from functools import partial

import jax.numpy as np
import numpy as onp
from jax import lax, pmap, random, tree_multimap
from jax.api import grad
from jax.config import config
from jax.experimental import optimizers, stax
from jax.experimental.stax import Dense, LogSoftmax, Relu
from jax.lib import xla_bridge
from jax.tree_util import tree_map

config.update("jax_debug_nans", False)

init_random_params, predict = stax.serial(Dense(16), Relu, Dense(4), LogSoftmax)


def loss(params, batch):
    inputs, targets = batch
    return -np.mean(np.sum(predict(params, inputs) * targets, axis=1))


if __name__ == "__main__":
    num_devices = xla_bridge.device_count()
    rng = onp.random.RandomState(0)
    images = rng.randn(64, 10).astype(onp.float32)
    labels = onp.eye(4, dtype=onp.float32)[rng.randint(4, size=64)]
    opt_init, opt_update, get_params = optimizers.momentum(0.1, mass=0.9)

    @partial(pmap, axis_name="batch")
    def spmd_update(i, opt_state, batch):
        grads = grad(loss)(get_params(opt_state), batch)
        grads = tree_map(lambda g: lax.psum(g, "batch") / num_devices, grads)
        return opt_update(i, grads, opt_state)

    def replicate(x):
        return np.broadcast_to(x, (num_devices, *x.shape))

    _, init_params = init_random_params(random.PRNGKey(0), (-1, 10))
    opt_state = tree_map(replicate, opt_init(init_params))
    batch = (images.reshape(num_devices, -1, 10), labels.reshape(num_devices, -1, 4))
    for i in range(5):
        opt_state = spmd_update(np.array([i] * num_devices), opt_state, batch)

    params = get_params(tree_map(lambda x: x[0], opt_state))
    moved = tree_multimap(lambda new, old: new - old, params, init_params)
    print(num_devices)
    leaves = [leaf for layer in moved for leaf in layer]
    onp.savez(sys.argv[1], *leaves, loss=loss(params, (images, labels)))
