"""Collectives over a mapped axis, ready for a block of its elements.

JAX vectorises the function of one element, control flow and all. For that the
collectives over the axis are replaced by equations of `split_p`, whose vectorisation
rule finds the whole block in its hands and looks up what to do in the table.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from shardmap._jax.collectives import axis_names
from shardmap._jax.effects import without_axis
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.typechecks import bound_axis, register_typecheck, type_equation
from shardmap._jax.types import Equation, Jaxpr, Primitive, Value
from shardmap._jax.walk import equations, equations_of, rewrite_jaxpr
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.map_primitive import binds
from shardmap.map.primitives.shard_maps import has_shard_maps

split_p = jex_core.Primitive("split_collective")
split_p.multiple_results = True


def split_collectives(jaxpr: Jaxpr, axis: AxisLayout) -> Any:
    """``jaxpr`` with its collectives over ``axis`` ready for a block of elements."""

    def split(equation: Equation) -> Any:
        if not is_collective(equation, axis.name):
            return equation
        return equation.replace(
            primitive=split_p,
            params={
                "axis": axis,
                "collective": equation.primitive,
                "params": tuple(sorted(equation.params.items())),
            },
            effects=without_axis(equation.effects, axis.name),
        )

    return rewrite_jaxpr(jaxpr, split, lambda e: not binds(e, axis.name))


def uses_axis(jaxpr: Jaxpr, name: Hashable) -> list[Any]:
    """The collective equations over the axis, in whatever other equations hold them."""
    found = equations(jaxpr, lambda equation: not binds(equation, name))
    return [equation for equation in found if is_collective(equation, name)]


def collectives_of(equation: Equation, name: Hashable) -> list[Any]:
    """The collectives over the axis that an equation is, or holds."""
    found = equations_of(equation, lambda equation: not binds(equation, name))
    return [equation for equation in found if is_collective(equation, name)]


def lowers_per_device(jaxpr: Jaxpr, name: Hashable, platform: str) -> bool:
    """Whether JAX lowers all collectives over the axis for one element per device.

    What a `jax.shard_map` holds has types with its mesh, which only vectorising makes
    anew.
    """
    return not has_shard_maps(jaxpr) and all(
        COLLECTIVES[equation.primitive].lowers_per_device(atom.aval, platform)
        for equation in uses_axis(jaxpr, name)
        for atom in equation.invars
    )


def is_collective(equation: Equation, name: Hashable) -> bool:
    """Whether the equation itself is a collective over the axis."""
    return equation.primitive in COLLECTIVES and name in axis_names(equation.params)


def has_collectives(jaxpr: Jaxpr) -> bool:
    """Whether there is any collective in ``jaxpr`` that sends something."""
    return any(
        equation.primitive in COLLECTIVES and COLLECTIVES[equation.primitive].kind
        for equation in equations(jaxpr)
    )


def _batching_rule(
    vmap: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axis: AxisLayout,
    collective: Primitive,
    params: tuple[tuple[str, Any], ...],
) -> tuple[list[Any], list[int | None]]:
    assert vmap.name == axis.vectorized_name
    blocks: list[Any] = [
        jnp.broadcast_to(arg, (axis.block, *jnp.shape(arg)))
        if dim is None
        else jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args, dims, strict=True)
    ]
    given, differ = COLLECTIVES[collective].rule(axis, *blocks, **dict(params))
    results = jax.tree.leaves(given)
    return results, [0 if differ else None] * len(results)


def _typecheck(
    *operands: Value, axis: AxisLayout, collective: Primitive, params: tuple[Any, ...]
) -> tuple[Any, Any]:
    with bound_axis(axis.name, axis.size):
        avals, effects = type_equation(collective, operands, dict(params))
    return avals, without_axis(effects, axis.name)


def_batching(split_p, _batching_rule)


register_typecheck(split_p, _typecheck)
