"""The removed names of JAX, and the new name of each.

After `install`, an old name gives the object of the new name. Modules of new names are
imported lazily.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardmap.sharding.spec import spec_of, spec_to_indices

# Removed modules, and the modules that have their names now.
MODULES = {
    "jax.api": "jax",
    "jax.experimental.host_callback": "shardmap.compat.host_callback",
    "jax.experimental.maps": "shardmap.compat.maps",
    "jax.experimental.optimizers": "jax.example_libraries.optimizers",
    "jax.experimental.sharding": "jax.sharding",
    "jax.experimental.stax": "jax.example_libraries.stax",
    "jax.linear_util": "jax.extend.linear_util",
    "jax.pxla": "jax.interpreters.pxla",
    "jax.util": "shardmap.compat.util",
    "jax.xla": "jax.interpreters.xla",
}

# All removed modules. For those not in MODULES, only the names below are known.
GONE = {
    *MODULES,
    "jax.abstract_arrays",
    "jax.config",
    "jax.interpreters.sharded_jit",
    "jax.lib.xla_bridge",
    "jax.lib.xla_client",
    "jax.lib.xla_extension",
    "jax.tools.colab_tpu",
}

# Names that still exist in JAX with another behavior.
REPLACED = {
    "jax.pmap": "shardmap.compat.pmap",
    "jax.experimental.pjit.pjit": "shardmap.compat.pjit.pjit",
}


def _moved(old: str, new: str, *names: str) -> dict[str, str]:
    """Old to new names that differ only in their beginnings."""
    return {old + name: new + name for name in names}


NAMES = {
    **REPLACED,
    **_moved("jax.ad_checkpoint.", "jax.", "checkpoint", "remat"),
    "jax.soft_pmap": "shardmap.spmap",
    **_moved("jax.", "shardmap.", "device_put_replicated", "device_put_sharded"),
    **_moved("jax.", "jax.interpreters.", "batching", "mlir", "partial_eval"),
    "jax.ShapedArray": "jax.core.ShapedArray",
    "jax.clear_backends": "jax.extend.backend.clear_backends",
    "jax.flatten_fun_nokwargs": "jax.api_util.flatten_fun_nokwargs",
    "jax.partial": "functools.partial",
    "jax.xla_computation": "shardmap.compat.ops.xla_computation",
    # Trees
    **_moved("jax.tree_", "jax.tree.", "all", "flatten", "leaves", "map", "reduce"),
    **_moved("jax.tree_", "jax.tree.", "structure", "transpose", "unflatten"),
    "jax.tree_multimap": "jax.tree.map",
    **_moved("jax.treedef_", "jax.tree_util.treedef_", "children", "is_leaf", "tuple"),
    "jax.tree_util.tree_multimap": "jax.tree_util.tree_map",
    # Layouts
    **{
        f"{module}.{old}": new
        for module in ("jax.sharding", "jax.experimental.sharding")
        for old, new in (
            ("MeshPspecSharding", "jax.sharding.NamedSharding"),
            ("PmapSharding", "shardmap.compat.PmapSharding"),
            ("XLACompatibleSharding", "jax.sharding.Sharding"),
        )
    },
    **_moved(
        "jax.interpreters.pxla.",
        "shardmap.",
        *("Chunked", "NoSharding", "Replicated", "ShardedAxis", "ShardingSpec"),
        *("Unstacked", "spec_to_indices"),
    ),
    **_moved("jax.interpreters.pxla.", "jax.sharding.", "Mesh", "PartitionSpec"),
    "jax.interpreters.pxla.PmapSharding": "shardmap.compat.PmapSharding",
    **_moved(
        "jax.interpreters.pxla.",
        "shardmap.compat.pxla.",
        *("AvalDimSharding", "MeshDimAssignment", "ShardedDeviceArray"),
        *("_pmap_sharding_spec", "make_sharded_device_array"),
        *("partitioned_sharding_spec", "replicate", "shard_arg_handlers"),
        *("soft_pmap", "xla_pmap"),
    ),
    **_moved(
        "jax.interpreters.pxla.",
        "shardmap.compat.core.",
        *("ArrayMapping", "Index", "MeshAxisName", "array_mapping_to_axis_resources"),
    ),
    "jax.interpreters.pxla.device_put": "shardmap.compat.pxla.device_put",
    "jax.interpreters.pxla.mesh_sharding_specs": "shardmap.mesh_sharding_spec",
    "jax.interpreters.pxla.sharding_spec_sharding_proto": (
        "shardmap.ShardingSpec.sharding_proto"
    ),
    "jax.interpreters.pxla.soft_pmap_p": "shardmap.spmap_p",
    "jax.interpreters.pxla.xla_pmap_p": "shardmap.spmap_p",
    **{
        f"{module}.{name}": "jax.Array"
        for module, names in (
            (
                "jax.interpreters.xla",
                ("Buffer", "DeviceArray", "_CppDeviceArray", "_DeviceArray"),
            ),
            ("jax.lib.xla_extension", ("ArrayImpl", "Buffer", "DeviceArray")),
        )
        for name in names
    },
    "jax.interpreters.xla.Device": "jax.Device",
    "jax.interpreters.xla.ShapedArray": "jax.core.ShapedArray",
    "jax.interpreters.xla.ConcreteArray": "shardmap.compat.core.ConcreteArray",
    "jax.interpreters.xla.abstractify": "jax.typeof",
    "jax.interpreters.xla.pytype_aval_mappings": "jax.core.pytype_aval_mappings",
    "jax.interpreters.xla.xla_call_p": "jax.extend.core.primitives.jit_p",
    **{
        f"jax.lib.{module}.{name}": new
        for module in ("xla_client", "xla_extension")
        for name, new in (
            ("Device", "jax.Device"),
            ("XlaRuntimeError", "jax.errors.JaxRuntimeError"),
        )
    },
    # Partitions
    "jax.experimental.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.sharded_jit": "shardmap.compat.sharded_jit",
    "jax.experimental.with_sharding_constraint": "shardmap.with_sharding_constraint",
    "jax.experimental.maps.Mesh": "jax.sharding.Mesh",
    "jax.experimental.maps.soft_pmap": "shardmap.spmap",
    "jax.experimental.pjit.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.pjit.pjit_p": "jax.extend.core.primitives.jit_p",
    **_moved("jax.experimental.pjit.", "jax.lax.", "with_sharding_constraint"),
    "jax.interpreters.sharded_jit.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.interpreters.sharded_jit.sharded_jit": "shardmap.compat.sharded_jit",
    **_moved("jax.interpreters.sharded_jit.", "shardmap.", "with_sharding_constraint"),
    # Jaxprs and primitives
    "jax.abstract_arrays.ShapedArray": "jax.core.ShapedArray",
    "jax.core.MapPrimitive": "shardmap.MapPrimitive",
    "jax.core.TypedJaxpr": "jax.extend.core.ClosedJaxpr",
    "jax.core.get_aval": "jax.typeof",
    **_moved(
        "jax.core.",
        "jax.extend.core.",
        *("ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"),
        *("jaxpr_as_fun", "mapped_aval", "subjaxprs", "unmapped_aval"),
        *("DebugInfo", "DropVar", "Effect", "Effects", "Token", "check_jaxpr"),
        *("concrete_or_error", "find_top_trace", "gensym", "get_opaque_trace_state"),
        *("new_jaxpr_eqn", "no_effects", "valid_jaxtype"),
        *("nonempty_axis_env_DO_NOT_USE", "primal_dtype_to_tangent_dtype"),
        "unsafe_am_i_under_a_jit_DO_NOT_USE",
        "unsafe_am_i_under_a_vmap_DO_NOT_USE",
        "unsafe_get_axis_names_DO_NOT_USE",
    ),
    **_moved(
        "jax.core.",
        "jax.errors.",
        *("ConcretizationTypeError", "InconclusiveDimensionOperation"),
        *("JaxprTypeError", "TracerArrayConversionError"),
        *("TracerIntegerConversionError", "UnexpectedTracerError"),
    ),
    **_moved("jax.core.", "jax.extend.core.primitives.", "call_p", "closed_call_p"),
    **_moved(
        "jax.core.",
        "shardmap.compat.core.",
        *("CallPrimitive", "ConcreteArray", "UnshapedArray", "axis_frame"),
        *("cur_sublevel", "full_lower", "raise_to_shaped", "trace_state_clean"),
    ),
    "jax.abstract_arrays.ConcreteArray": "shardmap.compat.core.ConcreteArray",
    "jax.abstract_arrays.raise_to_shaped": "shardmap.compat.core.raise_to_shaped",
    # Devices and settings
    "jax.config.config": "jax.config",
    "jax.experimental.compilation_cache.compilation_cache.initialize_cache": (
        "jax.experimental.compilation_cache.compilation_cache.set_cache_dir"
    ),
    "jax.experimental.disable_x64": "shardmap.compat.ops.disable_x64",
    "jax.experimental.enable_x64": "jax.enable_x64",
    **_moved(
        "jax.lib.xla_bridge.",
        "jax.",
        *("default_backend", "device_count", "devices", "local_device_count"),
        *("local_devices", "process_count", "process_index"),
    ),
    "jax.lib.xla_bridge.get_backend": "jax.extend.backend.get_backend",
    "jax.lib.xla_bridge.host_count": "jax.process_count",
    "jax.lib.xla_bridge.host_id": "jax.process_index",
    "jax.lib.xla_bridge.host_ids": "jax.process_indices",
    "jax.profiler.StepTraceContext": "jax.profiler.StepTraceAnnotation",
    "jax.profiler.TraceContext": "jax.profiler.TraceAnnotation",
    "jax.profiler.trace_function": "jax.profiler.annotate_function",
    # Numbers
    "jax.dlpack.to_dlpack": "shardmap.compat.ops.to_dlpack",
    **_moved("jax.lax.", "shardmap.compat.ops.", "pdot", "tie_in", "xeinsum"),
    "jax.lax.zeros_like_array": "jax.numpy.zeros_like",
    "jax.nn.normalize": "jax.nn.standardize",
    "jax.numpy.DeviceArray": "jax.Array",
    **_moved("jax.numpy.", "shardmap.compat.ops.", "NINF", "NZERO", "PZERO"),
    "jax.numpy.alltrue": "jax.numpy.all",
    "jax.numpy.cumproduct": "jax.numpy.cumprod",
    "jax.numpy.fix": "jax.numpy.trunc",
    "jax.numpy.in1d": "jax.numpy.isin",
    "jax.numpy.msort": "jax.numpy.sort",
    "jax.numpy.product": "jax.numpy.prod",
    "jax.numpy.round_": "jax.numpy.round",
    "jax.numpy.row_stack": "jax.numpy.vstack",
    "jax.numpy.sometrue": "jax.numpy.any",
    "jax.numpy.trapz": "jax.numpy.trapezoid",
    "jax.ops.index": "jax.numpy.index_exp",
    **_moved(
        "jax.ops.",
        "shardmap.compat.ops.",
        *("index_add", "index_max", "index_min", "index_mul", "index_update"),
    ),
    "jax.random.KeyArray": "jax.Array",
    "jax.random.PRNGKeyArray": "jax.Array",
    "jax.random.shuffle": "jax.random.permutation",
    **_moved("jax.random.", "jax.extend.random.", "threefry2x32_p", "threefry_2x32"),
}

# Names that have no effect any more.
IDLE = {
    **_moved(
        "jax.config.",
        "shardmap.compat.core.",
        *("FLAGS", "enable_omnistaging", "omnistaging_enabled"),
    ),
    **_moved(
        "jax.interpreters.pxla.",
        "shardmap.compat.core.",
        *("multi_host_supported_collectives", "spmd_primitive_batchers"),
    ),
    **_moved(
        "jax.interpreters.xla.",
        "shardmap.compat.core.",
        *("backend_specific_translations", "call_translations"),
        *("register_translation", "translations"),
    ),
    "jax.tools.colab_tpu.setup_tpu": "shardmap.compat.core.setup_tpu",
}
NAMES |= IDLE

# Options of `jax.config` that JAX has dropped.
DROPPED_OPTIONS = frozenset(
    {
        *("experimental_cpp_jit", "experimental_cpp_pmap", "jax_array"),
        "jax_backend_target",
        *("jax_coordination_service", "jax_cpp_jit", "jax_cpp_pjit", "jax_cpp_pmap"),
        *("jax_cpu_enable_gloo_collectives", "jax_custom_vjp_disable_shape_check"),
        *("jax_data_dependent_tracing_fallback", "jax_default_dtype_bits"),
        *("jax_dynamic_shapes", "jax_eager_pmap", "jax_emit_python_callbacks"),
        *("jax_enable_custom_vjp_by_custom_transpose", "jax_enable_memories"),
        *("jax_enable_mlir", "jax_experimental_name_stack"),
        "jax_experimental_subjaxpr_lowering_cache",
        *("jax_host_callback_ad_transforms", "jax_host_callback_inline"),
        *("jax_host_callback_legacy", "jax_host_callback_max_queue_byte_size"),
        *("jax_host_callback_outfeed", "jax_jit_pjit_api_merge", "jax_new_checkpoint"),
        *("jax_omnistaging", "jax_parallel_functions_output_gda"),
        *("jax_pmap_shmap_merge", "jax_refine_polymorphic_shapes"),
        *("jax_remat_opt_barrier", "jax_sharding_in_types", "jax_spmd_mode"),
        *("jax_unique_mhlo_module_names", "jax_use_original_source_locations"),
    }
)


def is_dropped(option: object, value: object) -> bool:
    """Whether JAX has dropped an option of `jax.config`, or what the value asks for.

    >>> is_dropped("jax_spmd_mode", "allow_all"), is_dropped("jax_enable_x64", True)
    (True, False)
    """
    # JAX still has the two options that chose the driver of Colab's first TPUs.
    return option in DROPPED_OPTIONS or value == "tpu_driver"


# Names that nothing stands in for, of JAX and of libraries of its time: what to do.
WITHOUT_STAND_IN = {
    "flax.optim": "Flax removed it in 0.6; use optax",
    "jax.experimental.callback": (
        "JAX removed it in 0.4.2; write an interpreter of jaxprs, as JAX's docs show"
    ),
    "jax.experimental.loops": (
        "JAX removed it in 0.3; use jax.lax.scan, fori_loop, while_loop and cond"
    ),
    "jax.interpreters.batching.BatchTracer": (
        "JAX made it private; isinstance(x, jax.core.Tracer) tells of any tracer"
    ),
    "jax.random.default_prng_impl": (
        "JAX made it private; jax.config.jax_default_prng_impl is its name"
    ),
}

# Functions whose old keyword arguments have become positions.
KEYWORDS = {
    "jax.numpy.clip": {"a": 0, "a_min": 1, "a_max": 2},
    "jax.numpy.where": {"condition": 0, "x": 1, "y": 2},
}

# Removed attributes of arrays: the edit for an array x, and the value.
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

# Edits of what is no name, and edits that are plainer than another name.
EDITS = {
    "jax.Array.__getitem__": "x[0] -> shardmap.shard_of(x, 0)",
    "jax.Array.__iter__": "for y in x -> for y in shardmap.unstack(x)",
    "jax.Array.device": "x.device() -> x.device",
    "jax.sharding.Mesh.__getitem__": "mesh['y',] -> shardmap.submesh(mesh, ('y',))",
    "jax.dlpack.to_dlpack": "jax.dlpack.to_dlpack(x) -> x.__dlpack__()",
    **{
        f"jax.config.{flags}": (
            f"jax.config.{flags}.option = value -> jax.config.update('option', value), "
            "or leave it out where JAX has no such option"
        )
        for flags in ("FLAGS", "config.FLAGS")
    },
    **{
        f"jax.config.update({option!r})": (
            f"jax.config.update({option!r}, ...) -> leave it out"
        )
        for option in (*DROPPED_OPTIONS, "jax_xla_backend")
    },
    "jax.experimental.disable_x64": (
        "jax.experimental.disable_x64() -> jax.enable_x64(False)"
    ),
    "jax.numpy.NINF": "jax.numpy.NINF -> -jax.numpy.inf",
    "jax.numpy.NZERO": "jax.numpy.NZERO -> -0.0",
    "jax.numpy.PZERO": "jax.numpy.PZERO -> 0.0",
    "jax.numpy.clip": "jax.numpy.clip(x, a_min=a, a_max=b) -> jax.numpy.clip(x, a, b)",
    "jax.numpy.where": "jax.numpy.where(c, x=a, y=b) -> jax.numpy.where(c, a, b)",
}


def new_name(old: str) -> str | None:
    """The new name of an old name or module; None if it is not an old name.

    >>> new_name("jax.tree_map"), new_name("jax.experimental.stax.Dense")
    ('jax.tree.map', 'jax.example_libraries.stax.Dense')
    >>> new_name("jax.api.tree_map")
    'jax.tree.map'
    """
    if old.startswith("jax.config.config."):  # The object was in a module.
        old = old.replace(".config", "", 1)
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
    path, value = first, importlib.import_module(first)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


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
