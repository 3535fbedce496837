"""A pmap in a pmap, as in 2020: experiments by shards, with metrics over both axes."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@partial(jax.pmap, axis_name="seeds", in_axes=(0, None))
def experiment(seed, data):
    @partial(jax.pmap, axis_name="shards")
    def moments(shard):
        mean = lax.pmean(shard.mean(), "shards")
        spread = lax.pmean(((shard - mean) ** 2).mean(), "shards")
        return mean * seed, spread, lax.pmean(mean * seed, ("seeds", "shards"))

    return moments(data)


data = np.arange(24, dtype=np.float32).reshape(4, 6)
seeds = jnp.asarray([1.0, 3.0])
means, spreads, of_all = experiment(seeds, data)
print(jax.tree_map(jnp.shape, (means, spreads, of_all)))
gradient = jax.grad(lambda d: experiment(seeds, d)[1].sum())(jnp.asarray(data))
np.savez(sys.argv[1], means=means, spreads=spreads, of_all=of_all, gradient=gradient)
