"""Map functions over devices in JAX: pmap's programming model, extended.

`import shardmap as sm` gives the public names and nothing else:

>>> import shardmap as sm
>>> sm.ShardingSpec((sm.Chunked(4), None), (sm.ShardedAxis(0), sm.Replicated(2)))
ShardingSpec((Chunked((4,)), None), (ShardedAxis(0), Replicated(2)))
"""

from typing import TYPE_CHECKING

from shardmap import _lazy

__version__ = "0.1.0"

__all__ = [
    "AS_CHUNKED",
    "AUTO",
    "EACH",
    "Chunked",
    "Explanation",
    "Interconnect",
    "MapPrimitive",
    "MappedFunction",
    "Mesh",
    "NoSharding",
    "Pieces",
    "Replicated",
    "Shard",
    "ShardPlan",
    "ShardedAxis",
    "ShardingSpec",
    "Unstacked",
    "__version__",
    "chunked",
    "device_put_replicated",
    "device_put_sharded",
    "explain",
    "local_mesh",
    "make_mesh",
    "mesh_map",
    "mesh_sharding_spec",
    "picture",
    "plan",
    "pmap_sharding",
    "register_collective",
    "register_rule",
    "register_shard_handler",
    "rules_of",
    "shard_of",
    "sharded_jit",
    "spec_of",
    "spec_to_indices",
    "spmap",
    "spmap_p",
    "submesh",
    "tap",
    "tap_print",
    "taps_barrier",
    "unreplicate",
    "unstack",
    "with_sharding_constraint",
]

# Names are imported lazily, which keeps `import shardmap` and the command line quick.
if TYPE_CHECKING:
    from shardmap import compat as compat
    from shardmap import extend as extend
    from shardmap.api.mesh_map import mesh_map
    from shardmap.api.sharded_jit import sharded_jit, with_sharding_constraint
    from shardmap.api.spmap import MappedFunction, spmap
    from shardmap.api.taps import tap, tap_print, taps_barrier
    from shardmap.arrays.array_likes import register_shard_handler
    from shardmap.arrays.shards import shard_of, unreplicate, unstack
    from shardmap.arrays.stacking import device_put_replicated, device_put_sharded
    from shardmap.explain.api import explain
    from shardmap.explain.draw.text import picture
    from shardmap.explain.explanation import Explanation
    from shardmap.explain.interconnect import Interconnect
    from shardmap.map.collectives.table import register_collective
    from shardmap.map.lowering import MapPrimitive, spmap_p
    from shardmap.plan.chunked import chunked
    from shardmap.plan.in_slices import AS_CHUNKED, EACH, Pieces
    from shardmap.plan.notation import register_rule, rules_of
    from shardmap.plan.plan import ShardPlan, plan
    from shardmap.plan.run.shards import Shard
    from shardmap.sharding.conversions import pmap_sharding
    from shardmap.sharding.mesh import Mesh, local_mesh, make_mesh, submesh
    from shardmap.sharding.spec import (
        Chunked,
        NoSharding,
        Replicated,
        ShardedAxis,
        ShardingSpec,
        Unstacked,
        mesh_sharding_spec,
        spec_of,
        spec_to_indices,
    )
    from shardmap.units import AUTO
else:
    __getattr__, __dir__ = _lazy.attach(
        __name__,
        {
            "shardmap.api.mesh_map": ["mesh_map"],
            "shardmap.api.sharded_jit": ["sharded_jit", "with_sharding_constraint"],
            "shardmap.api.spmap": ["MappedFunction", "spmap"],
            "shardmap.api.taps": ["tap", "tap_print", "taps_barrier"],
            "shardmap.arrays.array_likes": ["register_shard_handler"],
            "shardmap.arrays.shards": ["shard_of", "unreplicate", "unstack"],
            "shardmap.arrays.stacking": ["device_put_replicated", "device_put_sharded"],
            "shardmap.explain.api": ["explain"],
            "shardmap.explain.draw.text": ["picture"],
            "shardmap.explain.explanation": ["Explanation"],
            "shardmap.explain.interconnect": ["Interconnect"],
            "shardmap.map.collectives.table": ["register_collective"],
            "shardmap.map.lowering": ["MapPrimitive", "spmap_p"],
            "shardmap.plan.chunked": ["chunked"],
            "shardmap.plan.in_slices": ["AS_CHUNKED", "EACH", "Pieces"],
            "shardmap.plan.notation": ["register_rule", "rules_of"],
            "shardmap.plan.plan": ["ShardPlan", "plan"],
            "shardmap.plan.run.shards": ["Shard"],
            "shardmap.sharding.conversions": ["pmap_sharding"],
            "shardmap.sharding.mesh": ["Mesh", "local_mesh", "make_mesh", "submesh"],
            "shardmap.sharding.spec": [
                "Chunked",
                "NoSharding",
                "Replicated",
                "ShardedAxis",
                "ShardingSpec",
                "Unstacked",
                "mesh_sharding_spec",
                "spec_of",
                "spec_to_indices",
            ],
            "shardmap.units": ["AUTO"],
        },
        __all__,
        ["compat", "extend"],
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
            "PmapSharding": "shardmap.pmap_sharding, or shardmap.compat.PmapSharding",
            "install": "shardmap.compat.install",
        },
    )
    # What the core uses of plan and explain.
    _lazy.provide(
        batch_that_fits="shardmap.plan.inside.batch_size",
        explain="shardmap.explain.api",
        explanation_of="shardmap.explain.explanation",
        html_of="shardmap.explain.draw.html",
    )

del TYPE_CHECKING, _lazy
