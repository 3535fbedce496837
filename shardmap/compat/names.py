"""The removed names of JAX, and the new name of each.

While `install` is in force, an old name gives the object of the new name, as the edit
would. Modules of new names are imported lazily.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardmap.sharding.spec import spec_of, spec_to_indices

PXLA = "jax.interpreters.pxla"
SPECS = (
    *("Chunked", "NoSharding", "Replicated", "ShardedAxis", "ShardingSpec"),
    *("Unstacked", "spec_to_indices"),
)

# Modules that are gone: what each name in them is a name in.
MODULES = {
    "jax.api": "jax",
    "jax.experimental.host_callback": "shardmap.compat.host_callback",
    "jax.experimental.maps": "shardmap.compat.maps",
    "jax.experimental.optimizers": "jax.example_libraries.optimizers",
    "jax.experimental.sharding": "jax.sharding",
    "jax.experimental.stax": "jax.example_libraries.stax",
    "jax.linear_util": "jax.extend.linear_util",
    "jax.util": "shardmap.compat.util",
}

# All modules that are gone; of the others only the names below are known.
GONE = {
    *MODULES,
    "jax.abstract_arrays",
    "jax.config",
    "jax.interpreters.sharded_jit",
    "jax.lib.xla_bridge",
}

# Names that are there, but not as old programs know them.
REPLACED = {
    "jax.pmap": "shardmap.compat.pmap",
    "jax.experimental.pjit.pjit": "shardmap.compat.pjit.pjit",
}

NAMES = {
    **REPLACED,
    "jax.ad_checkpoint.checkpoint": "jax.checkpoint",
    "jax.ad_checkpoint.remat": "jax.remat",
    "jax.soft_pmap": "shardmap.spmap",
    "jax.device_put_replicated": "shardmap.device_put_replicated",
    "jax.device_put_sharded": "shardmap.device_put_sharded",
    "jax.partial": "functools.partial",
    "jax.xla_computation": "shardmap.compat.ops.xla_computation",
    # Trees
    "jax.tree_all": "jax.tree.all",
    "jax.tree_flatten": "jax.tree.flatten",
    "jax.tree_leaves": "jax.tree.leaves",
    "jax.tree_map": "jax.tree.map",
    "jax.tree_multimap": "jax.tree.map",
    "jax.tree_reduce": "jax.tree.reduce",
    "jax.tree_structure": "jax.tree.structure",
    "jax.tree_transpose": "jax.tree.transpose",
    "jax.tree_unflatten": "jax.tree.unflatten",
    "jax.treedef_children": "jax.tree_util.treedef_children",
    "jax.treedef_is_leaf": "jax.tree_util.treedef_is_leaf",
    "jax.treedef_tuple": "jax.tree_util.treedef_tuple",
    "jax.tree_util.tree_multimap": "jax.tree_util.tree_map",
    # Layouts
    "jax.sharding.MeshPspecSharding": "jax.sharding.NamedSharding",
    "jax.sharding.PmapSharding": "shardmap.compat.PmapSharding",
    "jax.sharding.XLACompatibleSharding": "jax.sharding.Sharding",
    "jax.experimental.sharding.MeshPspecSharding": "jax.sharding.NamedSharding",
    "jax.experimental.sharding.PmapSharding": "shardmap.compat.PmapSharding",
    "jax.experimental.sharding.XLACompatibleSharding": "jax.sharding.Sharding",
    **{f"{PXLA}.{name}": f"shardmap.{name}" for name in SPECS},
    f"{PXLA}.Mesh": "jax.sharding.Mesh",
    f"{PXLA}.PartitionSpec": "jax.sharding.PartitionSpec",
    f"{PXLA}.PmapSharding": "shardmap.compat.PmapSharding",
    **{
        f"{PXLA}.{name}": f"shardmap.compat.pxla.{name}"
        for name in (
            *("AvalDimSharding", "MeshDimAssignment", "ShardedDeviceArray"),
            *("_pmap_sharding_spec", "make_sharded_device_array"),
            *("partitioned_sharding_spec", "replicate", "shard_arg_handlers"),
            *("soft_pmap", "xla_pmap"),
        )
    },
    f"{PXLA}.mesh_sharding_specs": "shardmap.mesh_sharding_spec",
    f"{PXLA}.soft_pmap_p": "shardmap.spmap_p",
    f"{PXLA}.xla_pmap_p": "shardmap.spmap_p",
    "jax.interpreters.xla.DeviceArray": "jax.Array",
    "jax.interpreters.xla._DeviceArray": "jax.Array",
    # Partitions
    "jax.experimental.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.sharded_jit": "shardmap.compat.sharded_jit",
    "jax.experimental.with_sharding_constraint": "shardmap.with_sharding_constraint",
    "jax.experimental.maps.Mesh": "jax.sharding.Mesh",
    "jax.experimental.pjit.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.pjit.with_sharding_constraint": (
        "jax.lax.with_sharding_constraint"
    ),
    "jax.interpreters.sharded_jit.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.interpreters.sharded_jit.sharded_jit": "shardmap.compat.sharded_jit",
    "jax.interpreters.sharded_jit.with_sharding_constraint": (
        "shardmap.with_sharding_constraint"
    ),
    # What programs are made of
    "jax.abstract_arrays.ShapedArray": "jax.core.ShapedArray",
    "jax.core.ClosedJaxpr": "jax.extend.core.ClosedJaxpr",
    "jax.core.TypedJaxpr": "jax.extend.core.ClosedJaxpr",
    "jax.core.Jaxpr": "jax.extend.core.Jaxpr",
    "jax.core.JaxprEqn": "jax.extend.core.JaxprEqn",
    "jax.core.Literal": "jax.extend.core.Literal",
    "jax.core.MapPrimitive": "shardmap.MapPrimitive",
    "jax.core.Primitive": "jax.extend.core.Primitive",
    "jax.core.Var": "jax.extend.core.Var",
    "jax.core.get_aval": "jax.typeof",
    "jax.core.jaxpr_as_fun": "jax.extend.core.jaxpr_as_fun",
    "jax.core.mapped_aval": "jax.extend.core.mapped_aval",
    "jax.core.subjaxprs": "jax.extend.core.subjaxprs",
    "jax.core.unmapped_aval": "jax.extend.core.unmapped_aval",
    "jax.core.unsafe_get_axis_names_DO_NOT_USE": (
        "jax.extend.core.unsafe_get_axis_names_DO_NOT_USE"
    ),
    # Devices and settings
    "jax.config.config": "jax.config",
    "jax.experimental.enable_x64": "jax.enable_x64",
    "jax.lib.xla_bridge.device_count": "jax.device_count",
    "jax.lib.xla_bridge.devices": "jax.devices",
    "jax.lib.xla_bridge.get_backend": "jax.extend.backend.get_backend",
    "jax.lib.xla_bridge.host_count": "jax.process_count",
    "jax.lib.xla_bridge.host_id": "jax.process_index",
    "jax.lib.xla_bridge.local_device_count": "jax.local_device_count",
    "jax.lib.xla_bridge.local_devices": "jax.local_devices",
    "jax.lib.xla_bridge.process_count": "jax.process_count",
    "jax.lib.xla_bridge.process_index": "jax.process_index",
    # Numbers
    "jax.lax.pdot": "shardmap.compat.ops.pdot",
    "jax.lax.tie_in": "shardmap.compat.ops.tie_in",
    "jax.lax.xeinsum": "shardmap.compat.ops.xeinsum",
    "jax.nn.normalize": "jax.nn.standardize",
    "jax.numpy.DeviceArray": "jax.Array",
    "jax.numpy.in1d": "jax.numpy.isin",
    "jax.numpy.msort": "jax.numpy.sort",
    "jax.numpy.row_stack": "jax.numpy.vstack",
    "jax.numpy.trapz": "jax.numpy.trapezoid",
    "jax.ops.index": "jax.numpy.index_exp",
    "jax.ops.index_add": "shardmap.compat.ops.index_add",
    "jax.ops.index_max": "shardmap.compat.ops.index_max",
    "jax.ops.index_min": "shardmap.compat.ops.index_min",
    "jax.ops.index_mul": "shardmap.compat.ops.index_mul",
    "jax.ops.index_update": "shardmap.compat.ops.index_update",
    "jax.random.KeyArray": "jax.Array",
    "jax.random.PRNGKeyArray": "jax.Array",
    "jax.random.shuffle": "jax.random.permutation",
}

# Attributes that arrays had: the edit for an array x, and the value of x now.
ATTRIBUTES: dict[str, tuple[str, Callable[[jax.Array], Any]]] = {
    "copy_to_device": (
        "x.copy_to_device(device) -> jax.device_put(x, device)",
        lambda x: functools.partial(jax.device_put, x),
    ),
    "device_buffer": (
        "x.device_buffer -> x.addressable_data(0)",
        lambda x: x.addressable_data(0),
    ),
    "device_buffers": (
        "x.device_buffers -> [s.data for s in x.addressable_shards]",
        lambda x: [s.data for s in x.addressable_shards],
    ),
    "indices": (
        "x.indices -> shardmap.spec_to_indices(x.shape, shardmap.spec_of(x))",
        lambda x: spec_to_indices(x.shape, spec_of(x)),
    ),
    "one_replica_buffer_indices": (
        "x.one_replica_buffer_indices -> "
        "[k for k, s in enumerate(x.addressable_shards) if s.replica_id == 0]",
        lambda x: [k for k, s in enumerate(x.addressable_shards) if s.replica_id == 0],
    ),
    "sharding_spec": ("x.sharding_spec -> shardmap.spec_of(x)", spec_of),
    "to_py": (
        "x.to_py() -> numpy.asarray(x)",
        lambda x: functools.partial(np.asarray, x),
    ),
}


def new_name(old: str) -> str | None:
    """The new name of an old name or module; None if it is not an old name.

    >>> new_name("jax.tree_map"), new_name("jax.experimental.stax.Dense")
    ('jax.tree.map', 'jax.example_libraries.stax.Dense')
    >>> new_name("jax.api.tree_map")
    'jax.tree.map'
    """
    if old in NAMES or old in MODULES:
        return NAMES.get(old) or MODULES[old]
    module, _, name = old.rpartition(".")
    if module not in MODULES:
        return None
    new = f"{MODULES[module]}.{name}"
    return NAMES.get(new, new)


@functools.cache
def value_of(new: str) -> Any:
    """The object of a dotted name.

    >>> value_of("jax.config").__class__.__name__
    'Config'
    """
    first, *rest = new.split(".")
    path, found = first, importlib.import_module(first)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def exists(new: str) -> bool:
    """Whether a dotted name exists.

    >>> exists("jax.numpy.sin"), exists("jax.numpy.sine")
    (True, False)
    """
    try:
        value_of(new)
    except (AttributeError, ImportError):
        return False
    return True
