"""A layer with named axes on a mesh, as in 2021: xmap."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import SerialLoop, mesh, xmap

devices = np.array(jax.devices()).reshape(4, 2)
rng = np.random.RandomState(0)
w1, w2 = rng.randn(6, 8).astype("f"), rng.randn(8, 3).astype("f")
images = rng.randn(16, 6).astype("f")


def predict(w1, w2, x):
    hidden = jax.nn.relu(x @ w1)
    logits = lax.psum(hidden * w2, "hidden")
    return logits - jax.nn.logsumexp(logits)


predict_xmap = xmap(
    predict,
    in_axes=[{1: "hidden"}, ["hidden", ...], ["batch", ...]],
    out_axes=["batch", ...],
    axis_resources={"batch": "x", "hidden": "y"},
)
with mesh(devices, ("x", "y")):
    logits = predict_xmap(w1, w2, images)

centred = xmap(
    lambda x: x - lax.pmean(x, "batch"), in_axes=["batch", ...], out_axes=["batch", ...]
)(images)
looped = xmap(
    jnp.sin, in_axes=["i"], out_axes=["i"], axis_resources={"i": SerialLoop(4)}
)(jnp.arange(16.0))
print(logits.sharding_spec)
np.savez(sys.argv[1], logits=logits, centred=centred, looped=looped)
