"""Map functions over devices in JAX: pmap's programming model, extended.

`import shardmap as sm` gives the public names and nothing else:

>>> import shardmap as sm
>>> sm.ShardingSpec((sm.Chunked(4), None), (sm.ShardedAxis(0), sm.Replicated(2)))
ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))
"""

from shardmap import _lazy
from shardmap._version import __version__ as __version__

# The names are listed in __init__.pyi.
__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    {
        "pmap": "shardmap.spmap, which has its parameters",
        "soft_pmap": "shardmap.spmap, whose axes may be of any length",
        "vmap": "jax.vmap, which works inside and outside of shardmap.spmap",
        "shard_map": "shardmap.mesh_map, or jax.shard_map itself",
        "xmap": "shardmap.compat.maps.xmap, or shardmap.mesh_map",
        "pjit": "shardmap.compat.pjit.pjit, or jax.jit itself",
        "id_tap": "shardmap.tap, or shardmap.compat.host_callback.id_tap",
        "id_print": "shardmap.tap_print, or shardmap.compat.host_callback.id_print",
        "replicate": "shardmap.device_put_replicated",
        "PartitionSpec": "jax.sharding.PartitionSpec",
        "P": "jax.sharding.PartitionSpec",
        "NamedSharding": "jax.sharding.NamedSharding",
        "OpSharding": "shardmap.ShardingSpec.sharding_proto, which returns one",
        "PmapSharding": "shardmap.pmap_sharding, or shardmap.compat.PmapSharding",
        "install": "shardmap.compat.install",
    },
)

del _lazy
