"""Jaxprs with collectives, as `jax.vmap` takes them.

It knows no groups, of most collectives only those over one axis, and numbers what a
permutation over several moves wrongly.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import all_to_all_p, closed_call_p

from shardmap._jax.rules import def_batching
from shardmap._jax.typechecks import register_typecheck, type_equation
from shardmap._jax.types import Equation, Jaxpr, Param, Value, aval_of
from shardmap._jax.walk import equations_for, rewrite_jaxpr
from shardmap.map.collectives.split import split_collectives, uses_axis
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.map_primitive import is_no_map

grouped_p = jex_core.Primitive("grouped_all_to_all")


def vectorizable(jaxpr: Jaxpr, name: Hashable, size: int) -> Any:
    """``jaxpr`` for `jax.vmap` along an axis ``name``, perhaps None, of ``size``."""
    if name is not None and uses_axis(jaxpr, name):
        axis = AxisLayout(name, size, vectorized_name=name)
        jaxpr = split_collectives(jaxpr, axis)

    def change(equation: Equation) -> Any:
        if equation.primitive is closed_call_p:
            return _as_jit(equation)
        if (
            equation.primitive is not all_to_all_p
            or equation.params["axis_index_groups"] is None
        ):
            return equation
        return equation.replace(primitive=grouped_p)

    # Maps inside have this done to them when they are vectorised.
    return rewrite_jaxpr(jaxpr, change, is_no_map)


def _as_jit(equation: Equation) -> Any:
    """A call as `jax.jit` makes it.

    JAX names other calls when it vectorises them, which its type checker refuses.
    """
    results = [(a.shape, a.dtype) for a in map(aval_of, equation.outvars)]
    like = jax.jit(lambda *_: [jax.lax.empty(*result) for result in results])
    [call] = equations_for(like, equation.invars, equation.outvars, equation)
    params = call.params | {"jaxpr": equation.params["call_jaxpr"]}
    return equation.replace(primitive=call.primitive, params=params)


def _batching_rule(
    _: object,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    split_axis: int,
    concat_axis: int,
    **params: Param,
) -> tuple[Any, int | None]:
    """An all_to_all with groups over other axes."""
    (x,), (dim,) = args, dims
    if dim is not None:
        x = jnp.moveaxis(x, dim, 0)
        split_axis, concat_axis = split_axis + 1, concat_axis + 1
    axes = {"split_axis": split_axis, "concat_axis": concat_axis}
    return all_to_all_p.bind(x, **axes, **params), None if dim is None else 0


def _typecheck(*operands: Value, **params: Param) -> tuple[Any, Any]:
    return type_equation(all_to_all_p, operands, params)


def_batching(grouped_p, _batching_rule)
register_typecheck(grouped_p, _typecheck)
