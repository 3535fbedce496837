"""Changing the equations of a jaxpr, in whatever other equations hold them too."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from shardmap._jax.primitives import ALL_TO_ALL, PSUM, REDUCE_SCATTER
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.shard_maps import SHARD_MAP, walked_axes, with_manual_axes
from shardmap.map.primitives.tap import tap_p


def rewrite_jaxpr(
    jaxpr: Any,
    axis_name: Hashable,
    change: Callable[[Any, bool], Any],
    shadowed: bool = False,
    into_maps: bool = True,
    retype: Callable[[Any], Any] | None = None,
    renamed: Sequence[Hashable] | None = None,
) -> Any:
    """``jaxpr`` with ``change`` applied to each equation, the innermost first.

    Args:
      jaxpr: a jaxpr.
      axis_name: the axis that the change is about.
      change: takes an equation, and whether a map in between binds ``axis_name``
        again; gives the equation to have instead, or several.
      shadowed: the same for the whole jaxpr.
      into_maps: whether to change what maps hold, too, those of `jax.shard_map`
        included.
      retype: what to have instead of the aval of each variable.
      renamed: what the axis is called in the changed equations, none if they do not
        use it; None: they use it as before.
    """

    # Jaxprs are shared: a jitted function that is called twice has one.
    done: dict[tuple[int, bool], Any] = {}

    def rewrite(value: Any, shadowed: bool) -> Any:
        if isinstance(value, tuple):
            items = [rewrite(item, shadowed) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, jex_core.Jaxpr):
            key = id(value), shadowed
            if key not in done:
                done[key] = rewrite_equations(value, shadowed)
            return done[key]
        if isinstance(value, jex_core.ClosedJaxpr):
            return value.replace(jaxpr=rewrite(value.jaxpr, shadowed))
        return value

    def rewrite_equations(jaxpr: Any, shadowed: bool) -> Any:
        equations = []
        for equation in jaxpr.eqns:
            params = equation.params
            bound: Collection[Hashable] | None = None
            if equation.primitive is spmap_p:
                bound = (params["axis_name"],)
            elif equation.primitive is SHARD_MAP:
                bound = walked_axes(equation)
            # A tap's jaxpr is there for JAX to look at; it is not run.
            if (into_maps or bound is None) and equation.primitive is not tap_p:
                inside = shadowed or (bound is not None and axis_name in bound)
                held = {key: rewrite(value, inside) for key, value in params.items()}
                gone, come = _changed_effects(_inside(params), _inside(held))
                effects = equation.effects - gone | come
                equation = equation.replace(params=held, effects=effects)
            changed = change(equation, shadowed)
            for new in changed if isinstance(changed, list) else [changed]:
                effects = rename(new.effects, shadowed)
                equations.append(new.replace(effects=effects))
        gone, come = _changed_effects(jaxpr.eqns, equations)
        effects = rename(jaxpr.effects, shadowed) - gone | come
        changed = jaxpr.replace(eqns=equations, effects=effects)
        return changed if retype is None else _with_avals(changed, retype)

    def rename(effects: Any, shadowed: bool) -> Any:
        if renamed is None or shadowed:
            return effects
        return {
            new
            for effect in effects
            for new in (
                (dataclasses.replace(effect, name=name) for name in renamed)
                if getattr(effect, "name", _NO_NAME) == axis_name
                else (effect,)
            )
        }

    return rewrite(jaxpr, shadowed)


def _inside(params: dict[str, Any]) -> list[Any]:
    return list(jex_core.jaxprs_in_params(params))


def _changed_effects(
    before: Sequence[Any], after: Sequence[Any]
) -> tuple[set[Any], set[Any]]:
    """The effects that equations, or jaxprs, have no more, and their new ones."""
    was, now = (
        {e for item in items for e in item.effects} for items in (before, after)
    )
    return was - now, now - was


def _with_avals(jaxpr: Any, retype: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with other avals for its variables, but not for those further in."""
    made: dict[Any, Any] = {}

    def new(atom: Any) -> Any:
        if isinstance(atom, jex_core.Literal):
            # The value may have a type of its own.
            value, aval = np.asarray(atom.val), retype(atom.aval)
            return jex_core.Literal(value.item() if aval.weak_type else value, aval)
        if atom not in made:
            made[atom] = jex_core.Var(retype(atom.aval))
        return made[atom]

    def every(atoms: Sequence[Any]) -> list[Any]:
        return list(map(new, atoms))

    def on_new(effects: Any) -> Any:
        """The effects, of which some are on a variable: on the new one."""
        return {
            dataclasses.replace(effect, input=new(effect.input))
            if hasattr(effect, "input")
            else effect
            for effect in effects
        }

    return jaxpr.replace(
        constvars=every(jaxpr.constvars),
        invars=every(jaxpr.invars),
        outvars=every(jaxpr.outvars),
        eqns=[
            equation.replace(
                invars=every(equation.invars),
                outvars=every(equation.outvars),
                effects=on_new(equation.effects),
            )
            for equation in jaxpr.eqns
        ],
        effects=on_new(jaxpr.effects),
    )


_NO_NAME = object()


def under_mesh(jaxpr: Any, mesh: Any) -> Any:
    """``jaxpr`` as if it had been traced under ``mesh``, an abstract mesh.

    An equation remembers the mesh that it was traced under, and is lowered under it.
    """
    contexts: dict[Any, Any] = {}

    def change(equation: Any, shadowed: bool) -> Any:
        params = equation.params
        if equation.primitive is SHARD_MAP:
            if params["mesh"].axis_names != mesh.axis_names:
                return equation  # By the partitioner, on a mesh of its own.
            manual = with_manual_axes(mesh, walked_axes(equation))
            inside = _typed_with(under_mesh(params["jaxpr"], manual), manual)
            params = params | {"mesh": mesh, "jaxpr": inside}
        else:
            params = {key: _on_mesh(value, mesh) for key, value in params.items()}
        before = equation.ctx
        if id(before) not in contexts:
            with before.manager, jax.sharding.use_abstract_mesh(mesh):
                contexts[id(before)] = type(before)()
        return equation.replace(params=params, ctx=contexts[id(before)])

    # What maps hold is put under a mesh where they are lowered.
    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)


def _on_mesh(value: Any, mesh: Any) -> Any:
    """A sharding of values inside or around a shard_map, on ``mesh`` instead."""
    if (
        isinstance(value, NamedSharding)
        and isinstance(value.mesh, AbstractMesh)
        and value.mesh.axis_names == mesh.axis_names
    ):
        return NamedSharding(mesh, value.spec)
    return value


def _typed_with(jaxpr: Any, mesh: Any) -> Any:
    """``jaxpr``, of a shard_map, whose types name ``mesh`` instead of its own."""

    def retype(aval: Any) -> Any:
        sharding = _on_mesh(getattr(aval, "sharding", None), mesh)
        return aval if sharding is None else aval.update(sharding=sharding)

    return rewrite_jaxpr(jaxpr, None, lambda e, _: e, into_maps=False, retype=retype)


def tile_collectives(jaxpr: Any) -> Any | None:
    """``jaxpr`` with some collectives as JAX differentiates and vectorises them right.

    Without ``tiled``, JAX transposes an all_to_all wrongly that moves a dimension, and
    vectorises a psum_scatter wrongly along what lies behind the scattered dimension.

    Returns:
      The new jaxpr; None if there is nothing to change.
    """
    found = False

    def change(equation: Any, shadowed: bool) -> Any:
        nonlocal found
        params = equation.params
        if params.get("tiled", True):
            return equation
        tiled = {"params": params | {"tiled": True}}
        if equation.primitive is ALL_TO_ALL:
            # What `jax.lax.all_to_all` binds has the dimensions that it has if tiled.
            found = True
            return equation.replace(**tiled)
        if equation.primitive is not REDUCE_SCATTER:
            return equation
        found = True
        dimension = params["scatter_dimension"]
        (result,) = equation.outvars
        shape = list(result.aval.shape)
        shape.insert(dimension, 1)
        squeezed = jax.make_jaxpr(lambda x: jax.lax.squeeze(x, (dimension,)))(
            jax.ShapeDtypeStruct(shape, result.aval.dtype)
        ).jaxpr
        between = squeezed.invars[0]
        (squeeze,) = squeezed.eqns
        return [
            equation.replace(outvars=[between], **tiled),
            squeeze.replace(outvars=[result], ctx=equation.ctx),
        ]

    # Maps inside were traced on their own.
    tiled = rewrite_jaxpr(jaxpr, None, change, into_maps=False)
    return tiled if found else None


def widen(jaxpr: Any, collectives: Collection[Any]) -> Any:
    """``jaxpr`` whose ``collectives`` of bfloat16 are of float32 in between.

    Where only some axes of a mesh are manual, XLA's CPU compiler aborts at a reduction
    of bfloat16 between devices. It would widen it, too.
    """
    found = False

    def change(equation: Any, shadowed: bool) -> Any:
        nonlocal found
        narrow = [_is_narrow(atom) for atom in equation.invars]
        if equation.primitive not in collectives or not any(narrow):
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
        return [*before, equation.replace(invars=invars, outvars=outvars), *after]

    changed = rewrite_jaxpr(jaxpr, None, change)
    return changed if found else jaxpr


def _is_narrow(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.bfloat16


def _wide(atom: Any) -> Any:
    return jex_core.Var(jax.core.ShapedArray(atom.aval.shape, np.dtype(np.float32)))


def _convert(source: Any, target: Any, ctx: Any) -> Any:
    """The equation that converts to the dtype of ``target``."""
    struct = jax.ShapeDtypeStruct(source.aval.shape, source.aval.dtype)
    (equation,) = jax.make_jaxpr(
        lambda x: jax.lax.convert_element_type(x, target.aval.dtype)
    )(struct).jaxpr.eqns
    return equation.replace(invars=[source], outvars=[target], ctx=ctx)


def merge_sums(jaxpr: Any, axis_name: Hashable) -> Any:
    """``jaxpr`` with sums over an axis of sums over inner axes made one.

    What all elements of nested maps share gets its cotangent from the inner map as a
    sum, which the outer map sums again: two collectives, one after the other.
    """
    for equation in jaxpr.eqns:
        if not _is_sum(equation) or equation.params["axes"] != (axis_name,):
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


def _is_sum(equation: Any) -> bool:
    return (
        equation.primitive is PSUM
        and equation.params["axis_index_groups"] is None
        and len(equation.invars) == 1
    )


def _sum_inside(
    jaxpr: Any, result: Any, axis_name: Hashable, effects: Any
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
