"""Where JAX is: what is being traced, and what a program is lowered for.

No public name of JAX leads to these. Of what a lowering rule is given,
`jax.interpreters` names the class and says nothing about what is in it.
"""

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import config, core, xla_bridge
from jax._src.sharding_impls import GSPMDSharding
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, Sharding

from shardmap._jax import other_jax
from shardmap._jax.types import AnyMesh, Aval, Equation, Value

# Tracing


NO_MESH = AbstractMesh((), ())
"""With `jax.sharding.use_abstract_mesh`: as if no mesh were set around."""

EMPTY_MESH = Mesh(np.empty((), dtype=object), ())
"""With `jax.set_mesh`, where nothing is traced: as if no mesh were set around."""


def without_mesh() -> AbstractContextManager[None]:
    """As if no mesh were set around.

    While JAX traces, or binds the axis of a `jax.vmap`, no mesh can be set: then only
    the types of arrays are as without one.
    """
    if core.trace_state_clean():
        return jax.set_mesh(EMPTY_MESH)
    return jax.sharding.use_abstract_mesh(NO_MESH)


with jax.core.eval_context():
    TOP_LEVEL = jex_core.find_top_trace(())
"""What evaluates where nothing is traced."""


def _thread_local(name: str) -> Any:
    for module in (core, config):  # Releases differ in where it is.
        if hasattr(module, name):
            return getattr(module, name)
    raise other_jax(f"shardmap asks JAX what this thread traces, but has no {name}")


current_trace = _thread_local("trace_state_strong_ref").get_local
"""What this thread traces; one of `TOP_TRACES` where nothing is traced.

Each call of a map asks, and `jax.extend.core.find_top_trace` is three calls.
"""

TOP_TRACES = TOP_LEVEL, config.config_ext.unset


def nothing_is_traced() -> bool:
    """Whether a primitive that is bound here runs at once, on arrays."""
    return current_trace() in TOP_TRACES


def in_while_condition() -> bool:
    """Whether the condition of a `while_loop` is traced here, or in what is around.

    A batching rule has no other way to know: JAX vectorises conditions and bodies
    alike, each as a trace that says what it is for.
    """
    trace: Any = jex_core.find_top_trace(())
    while trace is not None:
        frame = getattr(trace, "frame", None)
        if frame is not None and frame.debug_info.traced_for == "while_cond":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


@contextlib.contextmanager
def casts_refused() -> Iterator[None]:
    """While a function is traced whose axes JAX has in no mesh.

    What `jax.lax.pcast` and its like give has a type that only a mesh allows. JAX says
    so with an error that names this type's class.
    """
    a_type = jax.core.ShapedArray((), np.dtype(bool)).manual_axis_type
    try:
        yield
    except (AssertionError, ValueError) as error:
        if type(a_type).__name__ not in str(error):
            raise
        raise ValueError(
            "jax.lax.pcast and jax.lax.pvary are for jax.shard_map: in a map no value "
            "is typed by the axes that it differs along. Leave the cast out; what it "
            "gives is its argument."
        ) from error


# Equations


def equation_context(equation: Equation, mesh: AnyMesh) -> Any:
    """What an equation remembers of where it was traced, with another mesh.

    An equation is lowered under the mesh that it was traced under. Its context is an
    object that takes what is around when it is made, and has no other way to be made.
    """
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(abstract):
        return type(equation.ctx)()


# Lowering


LoweringContext = mlir.LoweringRuleContext


def module_of(ctx: LoweringContext) -> object:
    """An object that there is one of for each program that is lowered."""
    return ctx.module_context.host_callbacks


def argument_meshes(ctx: LoweringContext) -> set[tuple[int, ...]]:
    """The sizes of the axes of each mesh that arguments of the program are on.

    JAX notes it for the program's first function, before it lowers what is in it.
    """
    for function in ctx.module_context.module.body.operations:
        if "arg_attrs" in function.attributes:
            noted = str(function.attributes["arg_attrs"])
            meshes = re.findall(r"mesh<\[([^\]]*)\]>", noted)
            return {tuple(map(int, re.findall(r'"=(\d+)', mesh))) for mesh in meshes}
    return set()


def mesh_around(ctx: LoweringContext) -> AnyMesh | None:
    """The mesh of the `jax.shard_map` that is lowered around; None: of no one."""
    return getattr(ctx.module_context.axis_context, "mesh", None)


def manual_axes(ctx: LoweringContext) -> frozenset[Any]:
    """The mesh axes along which the program is written per device here."""
    return getattr(ctx.module_context.axis_context, "manual_axes", frozenset())


def device_count(ctx: LoweringContext) -> int:
    """How many devices the program is for, where no mesh is around."""
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def devices_of(ctx: LoweringContext) -> Sequence[jax.Device]:
    """The devices that the program is for, where no mesh is around."""
    context: Any = ctx.module_context.axis_context
    devices: Sequence[jax.Device] = context.device_assignment
    return devices


def replicated_without_mesh(devices: Sequence[jax.Device]) -> Sharding:
    """A sharding over devices that names no mesh.

    JAX refuses a program that calls the host if the meshes of its arguments and of its
    constraints differ, which it only asks of shardings with a mesh.
    """
    return GSPMDSharding.get_replicated(tuple(devices))


def lower_inside(
    ctx: LoweringContext,
    run: Callable[..., Any],
    avals: Sequence[Aval],
    args: Sequence[Value],
) -> Any:
    """Lowers ``run`` in place of an equation whose operands have other types.

    Its ordered effects stay those of the equation.
    """
    inner = ctx.replace(avals_in=avals, tokens_out=None)
    results = mlir.lower_fun(run)(inner, *args)
    ctx.set_tokens_out(inner.tokens_out)
    return results


def config_value(name: str) -> Any:
    """What `jax.config` says here, in this thread and under its context managers."""
    return getattr(jax.config, name)


def configuration() -> Hashable:
    """What of JAX's configuration here programs are traced for.

    `jax.jit` keeps a program for each. No public name gives all of it.
    """
    found: Hashable = config.trace_context()
    return found


def backends_are_started() -> bool:
    """Whether JAX has looked for devices, and settled on its threads."""
    # No public name asks without making it so.
    return bool(xla_bridge.backends_are_initialized())
