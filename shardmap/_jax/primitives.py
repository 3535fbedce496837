"""Primitives of JAX without a public name, and details of equations.

Primitives are found by tracing functions that bind them.
"""

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import ad
from jax.sharding import AbstractMesh, PartitionSpec

from shardmap._jax import other_jax
from shardmap._jax.context import NO_MESH
from shardmap._jax.types import AnyJaxpr, Equation, Jaxpr, Params, Primitive, Value
from shardmap._jax.walk import as_open_jaxpr, equations, jaxprs_in


def equation_of(name: str, use: Callable[..., Any], *args: Value) -> Equation:
    """The equation of a primitive in the jaxpr of a function that binds it.

    Raises:
      ImportError: JAX binds no primitive by that name.
    """
    # Whatever mesh is set around.
    empty = jax.sharding.use_abstract_mesh(NO_MESH)
    with jax.disable_jit(False), empty:
        jaxpr = jax.make_jaxpr(use)(*args).jaxpr
    of_name = [e for e in equations(jaxpr) if e.primitive.name == name]
    if not of_name:
        raise other_jax(
            f"shardmap has rules for JAX's primitive {name}, but what should bind it "
            f"gives {[e.primitive.name for e in equations(jaxpr)]}"
        )
    return of_name[0]


def primitive_of(name: str, use: Callable[..., Any], *args: Value) -> Primitive:
    """The primitive by that name in the jaxpr of a function; see `equation_of`."""
    return equation_of(name, use, *args).primitive


# Programs written per device, and by the partitioner


def _shard_map() -> Primitive:
    mesh, spec = AbstractMesh((1,), ("i",)), PartitionSpec()
    mapped = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    return primitive_of("shard_map", mapped, 0.0)


def _custom_partitioning() -> Primitive:
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(lambda *_: None, sharding_rule="i -> i")
    return primitive_of("custom_partitioning", identity, np.zeros(1, np.float32))


SHARD_MAP = _shard_map()
CUSTOM_PARTITIONING = _custom_partitioning()
COMPOSITE = primitive_of("composite", lax.composite(lax.sin, "sine"), 0.0)
PURE_CALLBACK = primitive_of(
    "pure_callback",
    lambda: jax.pure_callback(lambda: 0.0, jax.ShapeDtypeStruct((), "float32")),
)


def callback_of(params: Params) -> Callable[..., Any]:
    """The function of a `jax.pure_callback`, by the parameters of its equation."""
    function: Callable[..., Any] = params["callback"].callback_func
    return function


def manual_axes_of(equation: Equation) -> frozenset[str]:
    """The mesh axes that a shard_map makes manual."""
    return frozenset(equation.params["newly_manual_axes"])


def is_pmap(equation: Equation) -> bool:
    """Whether a shard_map is that of `jax.pmap`, by the source of its function."""
    mapped = equation.params["jaxpr"].debug_info.func_src_info or ""
    return os.path.join("jax", "_src", "pmap.") in mapped


def function_name(jaxpr: AnyJaxpr) -> str:
    """The name of the function that was traced."""
    source: str = as_open_jaxpr(jaxpr).debug_info.func_src_info or ""
    return source.partition(" at ")[0]


def argument_names(jaxpr: Jaxpr) -> list[str]:
    """The key path of each argument of a traced function, such as ``x['w']``."""
    return list(jaxpr.debug_info.safe_arg_names(len(jaxpr.invars)))


# Collectives


def _registered(name: str) -> Primitive:
    """A primitive without a public name, found among those with a jvp rule.

    Tracing a function that binds it would take longer.
    """
    primitives = [each for each in ad.primitive_jvps if each.name == name]
    if len(primitives) != 1:
        raise other_jax(
            f"shardmap has rules for JAX's primitive {name}, but JAX differentiates "
            f"{len(primitives)} primitives of that name"
        )
    return primitives[0]


REDUCE_SCATTER = _registered("reduce_scatter")
PBROADCAST = _registered("pbroadcast")
PSUM_INVARIANT = _registered("psum_invariant")
"""`jax.lax.psum` in a `jax.shard_map` with ``check_vma=True`` binds this."""


def axis_names(params: Params) -> tuple[Any, ...]:
    """The axes of a collective; numbers among them are dimensions."""
    names = params.get("axes", params.get("axis_name"))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def with_axis_names(params: Params, names: tuple[Any, ...]) -> dict[str, Any]:
    """The parameters of the same collective over other axes."""
    key = "axes" if "axes" in params else "axis_name"
    is_tuple = isinstance(params[key], (tuple, list))
    return {**params, key: names if is_tuple else names[0]}


def named_axes(equation: Equation) -> tuple[Any, ...]:
    """The mapped axes in the parameters of an equation; none of a map."""
    names = axis_names(equation.params)
    named = tuple(name for name in names if not isinstance(name, int | None))
    return () if named and jaxprs_in(equation.params) else named


# Where an equation was traced


def vmaps_around(equation: Equation) -> int:
    """The number of vmaps around an equation in its jaxpr."""
    # Only the name stack tells.
    return str(equation.source_info.name_stack).count("vmap(")


def is_transposed(equation: Equation) -> bool:
    """Whether the equation was made by transposing another."""
    return "transpose(" in str(equation.source_info.name_stack)


def frames_of(
    equation: Equation, is_left_out: Callable[[str], bool] = lambda file: False
) -> Iterator[tuple[str, int, str]]:
    """File, line and function of each frame of an equation, innermost first."""
    traceback: Any = equation.source_info.traceback
    for code, offset in calls_of(equation, is_left_out):
        line = traceback.code_addr2line(code, offset)
        yield code.co_filename, line, code.co_qualname


def calls_of(
    equation: Equation, is_left_out: Callable[[str], bool]
) -> Iterator[tuple[types.CodeType, int]]:
    """The call in each frame of an equation: a function, and where in its code."""
    traceback: Any = equation.source_info.traceback
    # Its `frames` look up the lines of all, and a plan asks for each equation.
    codes, offsets = ((), ()) if traceback is None else traceback.raw_frames()
    for code, offset in zip(codes, offsets, strict=True):
        if not is_left_out(code.co_filename):
            yield code, offset


# Parameters


@functools.lru_cache(maxsize=1)
def remat_params() -> Params:
    """The parameters of an equation of `jax.checkpoint`; ``jaxpr`` is what it runs."""
    name = jex_core.primitives.remat_p.name
    return equation_of(name, jax.checkpoint(lax.sin), 0.0).params


def branch_of_platform(params: Params) -> Jaxpr | None:
    """The branch of `lax.platform_dependent` that runs here; None for another cond."""
    platforms = params.get("branches_platforms")
    here = jax.default_backend()
    # GPUs have a name for each maker.
    if platforms is None or here == "gpu":
        return None
    # That of all other platforms is the last one.
    for names, branch in zip(platforms, params["branches"], strict=True):
        if names is None or here in names:
            return cast(Jaxpr, branch)
    return None


def scan_counts(params: Params) -> tuple[int, int]:
    """The number of constants and of carries of a scan, by its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # From JAX 0.12 on.
    consts, carries, *_ = params["ft_in"].unpack()
    return len(list(consts.vals)), len(list(carries.vals))


def linear_solve(params: Params, operands: int) -> tuple[AnyJaxpr, list[int]]:
    """The jaxpr that solves, and the numbers of the operands that it takes."""
    counts, jaxprs = params["const_lengths"], params["jaxprs"]
    first = counts.matvec + counts.vecmat
    behind = first + counts.solve + counts.transpose_solve
    numbers = [*range(first, first + counts.solve), *range(behind, operands)]
    return jaxprs.solve, numbers


# From JAX 0.12 on some primitives are written in terms of others, and all of them are
# equations of one.


def expansion(params: Params) -> Callable[..., Any] | None:
    """The function of operands that such an equation stands for; None of others."""
    inner: Any = params.get("_prim")
    expand = getattr(inner, "expand", None)
    if expand is None:
        return None
    return lambda *operands: expand(*jax.tree.unflatten(inner.in_tree, operands))


def _expandable() -> Primitive | None:
    with jax.disable_jit(False):
        [call] = jax.make_jaxpr(jnp.searchsorted)(
            np.zeros(2, np.float32), np.zeros(2, np.float32)
        ).jaxpr.eqns
    equation = call.params["jaxpr"].eqns[-1]
    if expansion(equation.params) is not None:
        return equation.primitive
    # JAX 0.10 and 0.11 have a loop there.
    equation_of(
        "scan", jnp.searchsorted, np.zeros(2, np.float32), np.zeros(2, np.float32)
    )
    return None


EXPANDABLE = _expandable()
