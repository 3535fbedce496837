"""A mapped function to try `python -m shardmap explain` on."""

import jax
from jax import lax

import shardmap as sm


@sm.spmap(axis_name="batch", in_axes=(None, 0))
def predict(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Each element's prediction, less the mean of all: weights (m, n), x (batch, m).

    >>> import numpy as np
    >>> predict(np.ones((3, 2)), np.ones((4, 3))).shape
    (4, 2)
    """
    result = x @ weights
    return result - lax.pmean(result, "batch")
