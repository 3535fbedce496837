"""Reading and making layouts, as in 2021: pxla's specs, and programs as jaxprs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.interpreters import pxla, xla

spec = pxla.ShardingSpec(
    sharding=(pxla.Chunked([2]), pxla.NoSharding(), pxla.Chunked([2])),
    mesh_mapping=(pxla.ShardedAxis(1), pxla.ShardedAxis(0), pxla.Replicated(2)),
)
x = np.arange(4 * 3 * 6).reshape(4, 3, 6)
pieces = np.stack([x[index] for index in pxla.spec_to_indices(x.shape, spec)])

y = jax.pmap(lambda v: v * 2)(jnp.arange(24.0).reshape(8, 3))
assert isinstance(y, pxla.ShardedDeviceArray)
assert isinstance(y, xla.DeviceArray)
assert isinstance(y.sharding_spec, pxla.ShardingSpec)
pulled = np.concatenate([np.asarray(buffer) for buffer in y.device_buffers])

jaxpr = jax.make_jaxpr(jax.pmap(lambda v: v * 2))(y)
(equation,) = jaxpr.eqns
assert isinstance(jaxpr.jaxpr, core.Jaxpr)
assert isinstance(equation.primitive, core.MapPrimitive)
assert equation.primitive is pxla.xla_pmap_p
sharding = jax.sharding.PmapSharding.default(y.shape)
placed = jax.device_put_sharded(list(np.arange(8.0)), jax.devices())
np.savez(
    sys.argv[1],
    pieces=pieces,
    pulled=pulled,
    size=equation.params["axis_size"],
    equal=y.sharding.is_equivalent_to(sharding, 2),
    placed=placed,
    copies=jax.device_put_replicated(np.ones(3), jax.devices()),
)
