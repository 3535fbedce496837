"""The state of JAX: the trace, the axes and the mesh, and a lowering rule's context.

None of this has a public name. `jax.interpreters` has the class of a lowering rule's
context, but does not document its attributes.
"""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import config, core
from jax._src import mesh as mesh_lib
from jax._src.array import ArrayImpl
from jax._src.sharding_impls import GSPMDSharding
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, Sharding

from shardmap._jax.types import AnyMesh, Aval, Value

# Tracing


NO_MESH = AbstractMesh((), ())
"""With `jax.sharding.use_abstract_mesh`: as if no mesh were set around."""

EMPTY_MESH = Mesh(np.empty((), dtype=object), ())
"""With `jax.set_mesh`, where nothing is traced: as if no mesh were set around."""


def without_mesh() -> AbstractContextManager[None]:
    """A context without a mesh.

    In a trace, or inside a `jax.vmap`, no mesh can be set. There only the types of
    arrays are as without one.
    """
    if core.trace_state_clean():
        return jax.set_mesh(EMPTY_MESH)
    return jax.sharding.use_abstract_mesh(NO_MESH)


with jax.core.eval_context():
    TOP_LEVEL = jex_core.find_top_trace(())
"""What evaluates where nothing is traced."""


current_trace: Callable[[], Any] = core.trace_state_strong_ref.get_local
"""What this thread traces; one of `TOP_TRACES` where nothing is traced.

Each call of a map asks, and `jax.extend.core.find_top_trace` is three calls.
"""

TOP_TRACES = TOP_LEVEL, config.config_ext.unset


def nothing_is_traced() -> bool:
    """Whether a primitive that is bound here is evaluated."""
    return current_trace() in TOP_TRACES


def check_live(constants: Sequence[Value]) -> None:
    """Raises JAX's error for a tracer among constants whose trace has ended.

    JAX raises it where a program is run, and hands tracers on as arguments till then.
    """
    for constant in constants:
        if isinstance(constant, jax.core.Tracer) and nothing_is_traced():
            jax.lax.optimization_barrier(constant)  # Which takes none.


def in_while_condition() -> bool:
    """Whether the condition of a `while_loop` is being traced, here or around.

    JAX batches conditions and bodies alike: only the debug info of the trace differs.
    """
    trace: Any = jex_core.find_top_trace(())
    while trace is not None:
        frame = getattr(trace, "frame", None)
        if frame is not None and frame.debug_info.traced_for == "while_cond":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


# Axes and meshes


@contextlib.contextmanager
def bound_axes(sizes: Mapping[Any, int]) -> Iterator[None]:
    """A context as in the function of a map: with these axes bound, innermost last."""
    with check_vma_off(), core.extend_axis_env_nd(list(sizes.items())):
        yield


def traced_apart(marker: Hashable) -> AbstractContextManager[None]:
    """A context whose traces are not those of other contexts, in any cache of JAX."""
    return core.extend_axis_env_nd([(marker, 1)])


ArrayType = ArrayImpl
"""The type of arrays. Attributes that `jax.Array`, an interface, is given do not reach
them."""


def uncommitted(array: jax.Array) -> jax.Array:
    """An array on one device, which can meet arrays on any others.

    Nothing public gives one that is not on the default device.
    """
    if isinstance(array, ArrayImpl):
        return ArrayImpl(
            array.aval, array.sharding, [array], committed=False, _skip_checks=True
        )
    data = uncommitted(jax.random.key_data(array))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def refuse_check_vma() -> None:
    """Refuses a map inside a `jax.shard_map` with ``check_vma=True``."""
    if config._check_vma.value:
        raise ValueError(
            "a map of shardmap is inside a jax.shard_map with check_vma=True, but no "
            "value in a map says along which mesh axes it differs. Pass "
            "check_vma=False to that jax.shard_map."
        )


def check_vma_off() -> AbstractContextManager[Any]:
    """A context as in a `jax.shard_map` with ``check_vma=False``."""
    return config._check_vma(False)


def varying_axes(aval: Aval) -> tuple[str, ...]:
    """The varying mesh axes of a type; none with ``check_vma=False``."""
    return tuple(sorted(aval.manual_axis_type.varying))


def varying_like(value: jax.Array, like: Aval) -> jax.Array:
    """``value`` with the varying mesh axes of ``like`` too.

    All branches of a `jax.lax.cond` must have results of one type.
    """
    varying = varying_axes(jax.typeof(value))
    more = tuple(axis for axis in varying_axes(like) if axis not in varying)
    return jax.lax.pcast(value, more, to="varying") if more else value


def current_mesh() -> Mesh:
    """The mesh of ``with mesh:`` or `jax.set_mesh` around here; perhaps an empty one.

    No public name tells of ``with mesh:`` without a warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        here = mesh_lib.thread_resources.env.physical_mesh
    return here if not here.empty else concrete_mesh()


def concrete_mesh() -> Mesh:
    """The mesh of `jax.set_mesh` around here; perhaps an empty one.

    `jax.sharding.get_mesh` refuses while something is traced, and where a `jax.vmap`
    has a name.
    """
    return mesh_lib.get_concrete_mesh()


# Equations


@functools.lru_cache(maxsize=1024)
def equation_context(context: Any, mesh: AnyMesh) -> Any:
    """The context of an equation, ``equation.ctx``, with another mesh.

    It is made from the state of JAX, and in no other way, which takes long.
    """
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with context.manager, jax.sharding.use_abstract_mesh(abstract):
        return type(context)()


# Lowering


LoweringContext = mlir.LoweringRuleContext


def module_of(ctx: LoweringContext) -> object:
    """An object that lives as long as this program is lowered, and hashes."""
    return ctx.module_context.shape_poly_state


def argument_meshes(ctx: LoweringContext) -> set[tuple[int, ...]]:
    """The axis sizes of the meshes of the program's arguments.

    JAX adds them to the program's first function before it lowers the body.
    """
    for function in ctx.module_context.module.body.operations:
        if "arg_attrs" in function.attributes:
            noted = str(function.attributes["arg_attrs"])
            meshes = re.findall(r"mesh<\[([^\]]*)\]>", noted)
            return {tuple(map(int, re.findall(r'"=(\d+)', mesh))) for mesh in meshes}
    return set()


def mesh_around(ctx: LoweringContext) -> AnyMesh | None:
    """The mesh of the `jax.shard_map` around; None without one."""
    return getattr(ctx.module_context.axis_context, "mesh", None)


def manual_axes(ctx: LoweringContext) -> frozenset[Any]:
    """The mesh axes that are manual here."""
    return getattr(ctx.module_context.axis_context, "manual_axes", frozenset())


def device_count(ctx: LoweringContext) -> int:
    """The number of devices of the program, outside of `jax.shard_map`."""
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def devices_of(ctx: LoweringContext) -> Sequence[jax.Device]:
    """The devices of the program, outside of `jax.shard_map`."""
    context: Any = ctx.module_context.axis_context
    devices: Sequence[jax.Device] = context.device_assignment
    return devices


def replicated_without_mesh(devices: Sequence[jax.Device]) -> Sharding:
    """A replicated sharding that names no mesh.

    JAX refuses a program with host callbacks if the meshes of its arguments and
    constraints differ.
    """
    return GSPMDSharding.get_replicated(tuple(devices))


def lower_inside(
    ctx: LoweringContext,
    run: Callable[..., Any],
    avals: Sequence[Aval],
    args: Sequence[Value],
) -> Any:
    """Lowers ``run`` in place of an equation, with other types of its operands.

    The ordered effects are those of the equation.
    """
    inner = ctx.replace(avals_in=avals, tokens_out=None)
    results = mlir.lower_fun(run)(inner, *args)
    ctx.set_tokens_out(inner.tokens_out)
    return results


def config_value(name: str) -> Any:
    """A value of `jax.config`, whose attributes type checkers do not know."""
    return getattr(jax.config, name)


def configuration() -> Hashable:
    """The configuration of JAX that is part of the cache keys of `jax.jit`."""
    context: Hashable = config.trace_context()
    return context
