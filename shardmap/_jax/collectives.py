"""Primitives of `jax.lax` collectives without a public name, and the axes of one."""

from typing import Any

from jax.interpreters import ad

from shardmap._jax import other_jax
from shardmap._jax.types import Equation, Params, Primitive
from shardmap._jax.walk import jaxprs_in


def _registered(name: str) -> Primitive:
    """A primitive without a public name, found among those with a jvp rule.

    Tracing a function that binds it would take longer.
    """
    found = [primitive for primitive in ad.primitive_jvps if primitive.name == name]
    if len(found) != 1:
        raise other_jax(
            f"shardmap has rules for JAX's primitive {name}, but JAX differentiates "
            f"{len(found)} primitives of that name"
        )
    return found[0]


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
