"""The public names. `shardmap/__init__.py` imports each when it is first used."""

from shardmap import compat as compat
from shardmap import extend as extend
from shardmap.api.mesh_map import mesh_map as mesh_map
from shardmap.api.sharded_jit import sharded_jit as sharded_jit
from shardmap.api.sharded_jit import (
    with_sharding_constraint as with_sharding_constraint,
)
from shardmap.api.spmap import MappedFunction as MappedFunction
from shardmap.api.spmap import spmap as spmap
from shardmap.api.taps import tap as tap
from shardmap.api.taps import tap_print as tap_print
from shardmap.api.taps import taps_barrier as taps_barrier
from shardmap.arrays.shards import shard_of as shard_of
from shardmap.arrays.shards import unreplicate as unreplicate
from shardmap.arrays.shards import unstack as unstack
from shardmap.arrays.stacking import device_put_replicated as device_put_replicated
from shardmap.arrays.stacking import device_put_sharded as device_put_sharded
from shardmap.explaining.api import explain as explain
from shardmap.explaining.draw.text import picture as picture
from shardmap.explaining.explanation import Explanation as Explanation
from shardmap.explaining.interconnect import Interconnect as Interconnect
from shardmap.explaining.machines import devices as devices
from shardmap.explaining.meshes import compare_meshes as compare_meshes
from shardmap.extend import MapPrimitive as MapPrimitive
from shardmap.extend import register_collective as register_collective
from shardmap.extend import register_rule as register_rule
from shardmap.extend import register_shard_handler as register_shard_handler
from shardmap.extend import rules_of as rules_of
from shardmap.extend import spmap_p as spmap_p
from shardmap.planning.chunked import chunked as chunked
from shardmap.planning.in_slices import AS_CHUNKED as AS_CHUNKED
from shardmap.planning.in_slices import EACH as EACH
from shardmap.planning.in_slices import Pieces as Pieces
from shardmap.planning.lax.per_piece import per_piece as per_piece
from shardmap.planning.plan import ShardPlan as ShardPlan
from shardmap.planning.plan import plan as plan
from shardmap.planning.run.failures import ShardError as ShardError
from shardmap.planning.run.shards import Shard as Shard
from shardmap.sharding.mesh import Mesh as Mesh
from shardmap.sharding.mesh import local_mesh as local_mesh
from shardmap.sharding.mesh import make_mesh as make_mesh
from shardmap.sharding.mesh import pmap_sharding as pmap_sharding
from shardmap.sharding.mesh import submesh as submesh
from shardmap.sharding.spec import Chunked as Chunked
from shardmap.sharding.spec import NoSharding as NoSharding
from shardmap.sharding.spec import Replicated as Replicated
from shardmap.sharding.spec import ShardedAxis as ShardedAxis
from shardmap.sharding.spec import ShardingSpec as ShardingSpec
from shardmap.sharding.spec import Unstacked as Unstacked
from shardmap.sharding.spec import mesh_sharding_spec as mesh_sharding_spec
from shardmap.sharding.spec import spec_of as spec_of
from shardmap.sharding.spec import spec_to_indices as spec_to_indices
from shardmap.units import AUTO as AUTO

__version__: str
