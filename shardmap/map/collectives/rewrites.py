"""Collectives brought into the form that XLA takes best."""

import itertools
from collections.abc import Hashable, Sequence, Set
from typing import Any, cast

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p
import jax.numpy as jnp
import numpy as np

from shardmap._jax.collectives import REDUCE_SCATTER
from shardmap._jax.effects import NO_AXIS, axis_of, without_axis
from shardmap._jax.types import Atom, Effect, Equation, Jaxpr, Value, Var, aval_of
from shardmap._jax.walk import opened
from shardmap.map.collectives.inline_calls import copied
from shardmap.map.collectives.split import uses_axis
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.evaluation import CALLS
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.rewriting import changed_effects, rewrite_jaxpr

_HOLDERS = {p.jit_p: CALLS[p.jit_p], p.remat_p: CALLS[p.remat_p], spmap_p: "call_jaxpr"}
"""What may be changed in an equation that is to be differentiated."""


def tile_collectives(jaxpr: Jaxpr) -> Any | None:
    """``jaxpr`` with some collectives as JAX differentiates and vectorises them right.

    Without ``tiled``, JAX transposes an all_to_all wrongly that moves a dimension, and
    vectorises a psum_scatter wrongly along what lies behind the scattered dimension.

    Returns:
      The new jaxpr; None if there is nothing to change.
    """
    found = False

    def change(equation: Equation, shadowed: bool) -> Any:
        nonlocal found
        params = equation.params
        if params.get("tiled", True):
            return equation
        tiled = equation.replace(params=params | {"tiled": True})
        if equation.primitive is p.all_to_all_p:
            # What `jax.lax.all_to_all` binds has the dimensions that it has if tiled.
            found = True
            return tiled
        if equation.primitive is not REDUCE_SCATTER:
            return equation
        found = True
        dimension = params["scatter_dimension"]
        (result,) = equation.outvars
        aval = aval_of(result)
        shape = list(aval.shape)
        shape.insert(dimension, 1)
        squeezed = jax.make_jaxpr(lambda x: jax.lax.squeeze(x, (dimension,)))(
            jax.ShapeDtypeStruct(shape, aval.dtype)
        ).jaxpr
        between = squeezed.invars[0]
        (squeeze,) = squeezed.eqns
        return [
            tiled.replace(outvars=[between]),
            squeeze.replace(outvars=[result], ctx=equation.ctx),
        ]

    # Maps inside were traced on their own.
    tiled = rewrite_jaxpr(jaxpr, None, change, into_maps=False)
    return tiled if found else None


def widen(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` whose reductions of bfloat16 between devices are of float32.

    Where only some axes of a mesh are manual, XLA's CPU compiler aborts at a reduction
    of bfloat16 between devices. It would widen it, too.
    """
    found = False

    def change(equation: Equation, shadowed: bool) -> Any:
        nonlocal found
        narrow = [_is_narrow(atom) for atom in equation.invars]
        collective = COLLECTIVES.get(equation.primitive)
        if collective is None or not (collective.combiner and any(narrow)):
            return equation
        found = True
        invars, outvars = (
            [_wide(a) if n else a for a, n in zip(atoms, narrow, strict=True)]
            for atoms in (equation.invars, equation.outvars)
        )
        before, after = (
            [
                _convert(source, target, equation.ctx)
                for source, target in zip(sources, targets, strict=True)
                if source is not target
            ]
            for sources, targets in (
                (equation.invars, invars),
                (outvars, equation.outvars),
            )
        )
        wide = equation.replace(invars=invars, outvars=cast(list[Var], outvars))
        return [*before, wide, *after]

    changed = rewrite_jaxpr(jaxpr, None, change)
    return changed if found else jaxpr


def _is_narrow(atom: Atom) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.bfloat16


def _wide(atom: Atom) -> Any:
    return jex_core.Var(jax.core.ShapedArray(aval_of(atom).shape, np.dtype(np.float32)))


def _convert(source: Any, target: Any, ctx: Any) -> Any:
    """The equation that converts to the dtype of ``target``."""
    before, after = aval_of(source), aval_of(target)
    struct = jax.ShapeDtypeStruct(before.shape, before.dtype)
    (equation,) = jax.make_jaxpr(
        lambda x: jax.lax.convert_element_type(x, after.dtype)
    )(struct).jaxpr.eqns
    return equation.replace(invars=[source], outvars=[target], ctx=ctx)


def without_sums_of_shared(
    jaxpr: Jaxpr, axis_name: Hashable, axis_size: int, in_axes: Sequence[int | None]
) -> Any:
    """``jaxpr`` in which what all elements have alike is multiplied, and not added up.

    A result that is a sum and not mapped has one cotangent for all elements, which its
    derivative adds up before anything else: elements that run one after the other would
    all have to be there.
    """
    is_shared = [axis is None for axis in in_axes]
    return _without_sums(jaxpr, axis_name, axis_size, is_shared)[0]


def _without_sums(
    jaxpr: Any, axis_name: Hashable, axis_size: int, is_shared: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """The new jaxpr, and which of its results all elements have alike."""
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
        elif _may_differ(jaxpr.replace(eqns=[equation]), axis_name):
            results = [False] * len(results)
        equations += new
        shared.update(itertools.compress(equation.outvars, results))
    gone, come = changed_effects(jaxpr.eqns, equations)
    changed = jaxpr.replace(eqns=equations, effects=jaxpr.effects - gone | come)
    return changed, are_shared(jaxpr.outvars)


def _may_differ(alone: Jaxpr, axis_name: Hashable) -> bool:
    """Whether elements may get anything of the same operands, as of their indices.

    Args:
      alone: the equation. Some of JAX's collectives have no effect that would tell.
      axis_name: of the axis.
    """
    [equation] = alone.eqns
    return any(axis_of(e) is NO_AXIS for e in equation.effects) or bool(
        uses_axis(alone, axis_name)
    )


def _may_hold(equation: Equation, axis_name: Hashable) -> bool:
    """Whether an equation may hold sums over the axis that may be changed."""
    is_bound_again = equation.params.get("axis_name") == axis_name
    return equation.primitive in _HOLDERS and not is_bound_again


def _inside(equation: Equation, *how: Any) -> tuple[Any, list[bool]]:
    key = _HOLDERS[equation.primitive]
    held = equation.params[key]
    jaxpr = opened(held)
    changed, results = _without_sums(jaxpr, *how)
    gone, come = changed_effects([jaxpr], [changed])
    new = changed if jaxpr is held else held.replace(jaxpr=changed)
    effects = equation.effects - gone | come
    return equation.replace(
        params=equation.params | {key: new}, effects=effects
    ), results


def _multiplied(equation: Any, axis_name: Hashable, axis_size: int) -> list[Any]:
    """The equations of a sum over the axis of what its elements have alike."""
    (operand,), (result,) = equation.invars, equation.outvars
    aval = aval_of(operand)
    wide = aval.dtype
    if jnp.issubdtype(wide, jnp.inexact) and jnp.finfo(wide).bits < 32:
        wide = np.dtype(np.float32)  # Half precision ends at 65,504.
    traced = jax.make_jaxpr(
        lambda x: (x.astype(wide) * np.asarray(axis_size, wide)).astype(aval.dtype)
    )(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr
    others = tuple(name for name in equation.params["axes"] if name != axis_name)
    product = jex_core.Var(aval) if others else result
    multiplied = copied(traced, [operand], [product])
    equations = [e.replace(ctx=equation.ctx) for e in multiplied.eqns]
    if others:
        changed = equation.replace(
            invars=[product],
            params=equation.params | {"axes": others},
            effects=without_axis(equation.effects, axis_name),
        )
        equations.append(changed)
    return equations


def merge_sums(jaxpr: Jaxpr, axis_name: Hashable) -> Any:
    """``jaxpr`` with sums over an axis of sums over inner axes made one.

    What all elements of nested maps share gets its cotangent from the inner map as a
    sum, which the outer map sums again: two collectives, one after the other.
    """
    for equation in jaxpr.eqns:
        if not _is_sum(equation, axis_name) or len(equation.params["axes"]) > 1:
            continue
        (inner,), (result,) = equation.invars, equation.outvars
        if any(var is result for e in jaxpr.eqns for var in e.invars):
            continue  # A sum of the function's own, which it goes on with.
        merged = _sum_inside(jaxpr, inner, axis_name, equation.effects)
        if merged is not None:
            jaxpr = merged.replace(
                eqns=[e for e in merged.eqns if e is not equation],
                outvars=[inner if var is result else var for var in merged.outvars],
            )
    return jaxpr


def _is_sum(equation: Equation, axis_name: Hashable = None) -> bool:
    """Whether it adds up all elements, of that axis among others if it is given."""
    return (
        equation.primitive is p.psum_p
        and axis_name in (None, *equation.params["axes"])
        and equation.params["axis_index_groups"] is None
        and len(equation.invars) == 1
    )


def _sum_inside(
    jaxpr: Jaxpr, result: Value, axis_name: Hashable, effects: Set[Effect]
) -> Any | None:
    """``jaxpr`` whose ``result`` is summed over the axis, too.

    None where it is not a sum already, here or in a map, or has other uses.
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
