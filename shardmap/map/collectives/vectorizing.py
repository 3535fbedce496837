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
from shardmap.map.collectives.split import split_collectives, uses_axis
from shardmap.map.collectives.split_axis import SplitAxis
from shardmap.map.primitives.rewriting import rewrite_jaxpr

grouped_p = jex_core.Primitive("grouped_all_to_all")


def vectorizable(jaxpr: Jaxpr, name: Hashable, size: int) -> Any:
    """``jaxpr`` for `jax.vmap` along an axis ``name``, perhaps None, of ``size``."""
    if name is not None and uses_axis(jaxpr, name):
        axis = SplitAxis(name, size, (), 1, size, vectorized_name=name)
        jaxpr = split_collectives(jaxpr, axis)
    found = False

    def change(equation: Equation, shadowed: bool) -> Any:
        nonlocal found
        if equation.primitive is closed_call_p:
            found = True
            return _as_jit(equation)
        if (
            equation.primitive is not all_to_all_p
            or equation.params["axis_index_groups"] is None
        ):
            return equation
        found = True
        return equation.replace(primitive=grouped_p)

    # Maps inside have this done to them when they are vectorised.
    changed = rewrite_jaxpr(jaxpr, None, change, into_maps=False)
    return changed if found else jaxpr


def _as_jit(equation: Equation) -> Any:
    """A call as `jax.jit` makes it.

    JAX names other calls when it vectorises them, which its type checker refuses.
    """
    structs, results = (
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval_of, atoms)]
        for atoms in (equation.invars, equation.outvars)
    )
    like = jax.jit(lambda *_: [jax.lax.empty(r.shape, r.dtype) for r in results])
    [call] = jax.make_jaxpr(like)(*structs).eqns
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
