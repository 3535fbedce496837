"""Rewrites of collectives, for JAX's rules and for XLA."""

import itertools
from collections.abc import Hashable, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p
import jax.numpy as jnp
import numpy as np

from shardmap._jax.collectives import REDUCE_SCATTER
from shardmap._jax.effects import NO_AXIS, axis_of, without_axis
from shardmap._jax.types import (
    Atom,
    Effect,
    Equation,
    Jaxpr,
    Value,
    aval_of,
    with_shape,
)
from shardmap._jax.walk import (
    CALLS,
    effects_after,
    equations_for,
    opened,
    rewrite_jaxpr,
)
from shardmap.map.collectives.split import collectives_of
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import is_no_map, spmap_p

_HOLDERS = {p.jit_p: CALLS[p.jit_p], p.remat_p: CALLS[p.remat_p], spmap_p: "call_jaxpr"}
"""Primitives whose jaxprs may be changed before they are differentiated."""


def tiled(equation: Equation) -> Any:
    """An all_to_all or psum_scatter as a tiled one; others as they are.

    Without ``tiled``, JAX's transpose of an all_to_all that moves a dimension is wrong,
    and so is its batching of a psum_scatter behind the scattered dimension.
    """
    params = equation.params
    if params.get("tiled", True):
        return equation
    changed = equation.replace(params=params | {"tiled": True})
    if equation.primitive is p.all_to_all_p:
        # `jax.lax.all_to_all` has made the dimensions those of a tiled one.
        return changed
    if equation.primitive is not REDUCE_SCATTER:
        return equation
    dimension = params["scatter_dimension"]
    (result,) = equation.outvars
    aval = aval_of(result)
    shape = list(aval.shape)
    shape.insert(dimension, 1)
    between = jex_core.Var(with_shape(aval, shape))
    squeeze = equations_for(
        lambda x: jax.lax.squeeze(x, (dimension,)), [between], [result], equation
    )
    return [changed.replace(outvars=[between]), *squeeze]


def tile_collectives(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` with all_to_all and psum_scatter tiled; see `tiled`."""
    # Maps inside were rewritten when they were traced.
    return rewrite_jaxpr(jaxpr, tiled, is_no_map)


def upcast_bfloat16_reductions(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` with reductions of bfloat16 in float32.

    XLA's CPU compiler aborts at a reduction of bfloat16 between devices if only some
    mesh axes are manual.
    """

    def change(equation: Equation) -> Any:
        narrow = [_is_narrow(atom) for atom in equation.invars]
        collective = COLLECTIVES.get(equation.primitive)
        if collective is None or not (collective.combiner and any(narrow)):
            return equation
        invars: list[Any]
        outvars: list[Any]
        invars, outvars = (
            [_wide(a) if n else a for a, n in zip(atoms, narrow, strict=True)]
            for atoms in (equation.invars, equation.outvars)
        )
        return [
            *_converted(equation.invars, invars, equation),
            equation.replace(invars=invars, outvars=outvars),
            *_converted(outvars, equation.outvars, equation),
        ]

    return rewrite_jaxpr(jaxpr, change)


def _is_narrow(atom: Atom) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.bfloat16


def _wide(atom: Atom) -> Any:
    return jex_core.Var(jax.core.ShapedArray(aval_of(atom).shape, np.dtype(np.float32)))


def _converted(
    sources: Sequence[Any], targets: Sequence[Any], like: Equation
) -> list[Any]:
    """The equations that convert to the dtypes of other variables."""
    return [
        equation
        for source, target in zip(sources, targets, strict=True)
        if source is not target
        for equation in equations_for(
            lambda x, dtype=target.aval.dtype: x.astype(dtype),
            [source],
            [target],
            like,
        )
    ]


def without_sums_of_shared(
    jaxpr: Jaxpr, axis_name: Hashable, axis_size: int, in_axes: Sequence[int | None]
) -> Any:
    """``jaxpr`` with sums of equal values as products with the number of elements.

    The transpose of an unmapped sum begins with a sum of its cotangent, which is the
    same in all elements. A loop over elements could not begin with a collective.
    """
    is_shared = [axis is None for axis in in_axes]
    return _without_sums(jaxpr, axis_name, axis_size, is_shared)[0]


def _without_sums(
    jaxpr: Any, axis_name: Hashable, axis_size: int, is_shared: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """The new jaxpr, and which of its results are the same in all elements."""
    shared = {
        var for var, is_one in zip(jaxpr.invars, is_shared, strict=True) if is_one
    }

    def are_shared(atoms: Sequence[Atom]) -> list[bool]:
        return [isinstance(a, jex_core.Literal) or a in shared for a in atoms]

    equations: list[Equation] = []
    for equation in jaxpr.eqns:
        operands = are_shared(equation.invars)
        new, results = [equation], [all(operands)] * len(equation.outvars)
        if _may_hold(equation, axis_name):
            changed, results = _inside(equation, axis_name, axis_size, operands)
            new = [changed]
        elif all(operands) and _is_sum(equation, axis_name):
            new = _multiplied(equation, axis_name, axis_size)
        elif _may_differ(equation, axis_name):
            results = [False] * len(results)
        equations += new
        shared.update(itertools.compress(equation.outvars, results))
    effects = effects_after(jaxpr, jaxpr.eqns, equations)
    changed = jaxpr.replace(eqns=equations, effects=effects)
    return changed, are_shared(jaxpr.outvars)


def _may_differ(equation: Equation, axis_name: Hashable) -> bool:
    """Whether elements may get different results of the same operands."""
    # Some of JAX's collectives have no effect that would tell.
    return any(axis_of(e) is NO_AXIS for e in equation.effects) or bool(
        collectives_of(equation, axis_name)
    )


def _may_hold(equation: Equation, axis_name: Hashable) -> bool:
    """Whether to look for sums over the axis in the jaxpr of an equation."""
    is_bound_again = equation.params.get("axis_name") == axis_name
    return equation.primitive in _HOLDERS and not is_bound_again


def _inside(equation: Equation, *how: Any) -> tuple[Any, list[bool]]:
    key = _HOLDERS[equation.primitive]
    held = equation.params[key]
    jaxpr = opened(held)
    changed, results = _without_sums(jaxpr, *how)
    new = changed if jaxpr is held else held.replace(jaxpr=changed)
    effects = effects_after(equation, [jaxpr], [changed])
    return equation.replace(
        params=equation.params | {key: new}, effects=effects
    ), results


def _multiplied(equation: Any, axis_name: Hashable, axis_size: int) -> list[Any]:
    """The equations of a sum over the axis, of a value that all elements share."""
    (operand,), (result,) = equation.invars, equation.outvars
    aval = aval_of(operand)
    wide = aval.dtype
    if jnp.issubdtype(wide, jnp.inexact) and jnp.finfo(wide).bits < 32:
        wide = np.dtype(np.float32)  # Half precision ends at 65,504.
    others = tuple(name for name in equation.params["axes"] if name != axis_name)
    product = jex_core.Var(aval) if others else result
    equations = equations_for(
        lambda x: (x.astype(wide) * np.asarray(axis_size, wide)).astype(aval.dtype),
        [operand],
        [product],
        equation,
    )
    if others:
        changed = equation.replace(
            invars=[product],
            params=equation.params | {"axes": others},
            effects=without_axis(equation.effects, axis_name),
        )
        equations.append(changed)
    return equations


def merge_sums(jaxpr: Jaxpr, axis_name: Hashable) -> Any:
    """``jaxpr`` with a sum of sums in a map inside as one sum over both axes.

    The cotangent of a value that nested maps share is summed by the inner map, and then
    by the outer one: two collectives, one after the other.
    """
    for equation in jaxpr.eqns:
        if not _is_sum(equation, axis_name) or len(equation.params["axes"]) > 1:
            continue
        (inner,), (result,) = equation.invars, equation.outvars
        if any(var is result for e in jaxpr.eqns for var in e.invars):
            continue  # The function itself uses this sum.
        merged = _sum_inside(jaxpr, inner, axis_name, equation.effects)
        if merged is not None:
            jaxpr = merged.replace(
                eqns=[e for e in merged.eqns if e is not equation],
                outvars=[inner if var is result else var for var in merged.outvars],
            )
    return jaxpr


def _is_sum(equation: Equation, axis_name: Hashable = None) -> bool:
    """Whether an equation is a sum without groups, over that axis if it is given."""
    return (
        equation.primitive is p.psum_p
        and axis_name in (None, *equation.params["axes"])
        and equation.params["axis_index_groups"] is None
        and len(equation.invars) == 1
    )


def _sum_inside(
    jaxpr: Jaxpr, result: Value, axis_name: Hashable, effects: Set[Effect]
) -> Any | None:
    """``jaxpr`` with the sum ``result`` over the axis, too.

    None if it is not a sum, here or in a map, or has other uses.
    """
    uses = [var for e in jaxpr.eqns for var in e.invars] + list(jaxpr.outvars)
    makers = [e for e in jaxpr.eqns if any(var is result for var in e.outvars)]
    if not makers or sum(var is result for var in uses) != 1:
        return None
    (maker,) = makers
    params = maker.params
    if _is_sum(maker) and axis_name not in params["axes"]:
        changed = {"axes": (*params["axes"], axis_name)}
    elif maker.primitive is spmap_p and params["axis_name"] != axis_name:
        (place,) = [k for k, var in enumerate(maker.outvars) if var is result]
        inside = params["call_jaxpr"]
        merged = None
        if params["out_axes"][place] is None:
            merged = _sum_inside(inside, inside.outvars[place], axis_name, effects)
        if merged is None:
            return None
        changed = {"call_jaxpr": merged}
    else:
        return None
    summed = maker.replace(params=params | changed, effects=maker.effects | effects)
    return jaxpr.replace(
        eqns=[summed if e is maker else e for e in jaxpr.eqns],
        effects=jaxpr.effects | effects,
    )
