"""Rules for your own primitives, collectives and array types.

>>> import jax, jax.numpy as jnp, shardmap as sm
>>> class Celsius:
...     shape, dtype = (2,), "float32"
>>> sm.extend.register_shard_handler(
...     Celsius, lambda value, sharding: jax.device_put(jnp.ones(2), sharding)
... )
>>> sm.spmap(lambda x: x + 273)(Celsius())
Array([274., 274.], dtype=float32)
"""

from shardmap.map.collectives.table import register_collective
from shardmap.map.lowering import MapPrimitive, spmap_p
from shardmap.planning.notation import register_rule, rules_of
from shardmap.planning.sources.registry import register_shard_handler

__all__ = [
    "MapPrimitive",
    "register_collective",
    "register_rule",
    "register_shard_handler",
    "rules_of",
    "spmap_p",
]
