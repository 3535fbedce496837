"""Names that JAX had before 0.8, for programs written for `jax.pmap`.

    from shardmap.compat import pmap, device_put_replicated

Most are aliases of functions of `shardmap`. `host_callback`, `maps`, `pjit`, `pxla` and
`util` have the functions of JAX's old modules with the same parameters. `install`
installs all of them in JAX. docs/migrating.md describes them.
"""

from shardmap.api.sharded_jit import with_sharding_constraint
from shardmap.api.spmap import spmap as soft_pmap
from shardmap.arrays.stacking import device_put_replicated, device_put_sharded
from shardmap.compat import host_callback, maps, pjit, pxla, util
from shardmap.compat.api import pmap, sharded_jit
from shardmap.compat.host_callback import barrier_wait, call, id_print, id_tap
from shardmap.compat.installing import install, uninstall, uses
from shardmap.compat.maps import SerialLoop, xmap
from shardmap.compat.pxla import (
    PmapSharding,
    ShardedDeviceArray,
    _pmap_sharding_spec,
    make_sharded_device_array,
    partitioned_sharding_spec,
    replicate,
    shard_arg_handlers,
)
from shardmap.sharding.spec import (
    AvalDimSharding,
    Chunked,
    MeshDimAssignment,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    spec_to_indices,
)

__all__ = [
    "AvalDimSharding",
    "Chunked",
    "MeshDimAssignment",
    "NoSharding",
    "PmapSharding",
    "Replicated",
    "SerialLoop",
    "ShardedAxis",
    "ShardedDeviceArray",
    "ShardingSpec",
    "Unstacked",
    "_pmap_sharding_spec",
    "barrier_wait",
    "call",
    "device_put_replicated",
    "device_put_sharded",
    "host_callback",
    "id_print",
    "id_tap",
    "install",
    "make_sharded_device_array",
    "maps",
    "partitioned_sharding_spec",
    "pjit",
    "pmap",
    "pxla",
    "replicate",
    "shard_arg_handlers",
    "sharded_jit",
    "soft_pmap",
    "spec_to_indices",
    "uninstall",
    "uses",
    "util",
    "with_sharding_constraint",
    "xmap",
]
