"""The first cells of a notebook, from 2021 to 2023: settings that JAX has dropped."""

import sys

import jax
import jax.numpy as jnp
import jax.tools.colab_tpu
import numpy as np
from jax.config import config
from jax.experimental import maps
from jax.experimental.pjit import pjit
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

if "--colab" in sys.argv:
    jax.tools.colab_tpu.setup_tpu()
config.FLAGS.jax_xla_backend = "tpu_driver"
config.update("jax_array", True)
jax.config.update("jax_spmd_mode", "allow_all")


def in_jit():
    return jax.core.cur_sublevel().level > 0


devices = np.array(jax.devices()).reshape(4, 2)
maps.thread_resources.env = maps.ResourceEnv(maps.Mesh(devices, ("dp", "mp")), ())


def layer(w, x):
    return jnp.tanh(with_sharding_constraint(x @ w, P("dp", "mp")))


x = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
w = np.ones((4, 6), np.float32) / 4
y = pjit(layer, in_axis_resources=(P(None, "mp"), P("dp")), out_axis_resources=None)(
    w, x
)
assert not in_jit()
np.savez(sys.argv[1], first=y[0], total=y.sum(), whole=y.is_fully_replicated)
