"""Rewrites of collectives: names of axes, and forms for JAX's rules and for XLA."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p
import jax.numpy as jnp
import numpy as np

from shardmap._jax.effects import axis_of, with_axis, without_axis
from shardmap._jax.primitives import (
    REDUCE_SCATTER,
    axis_names,
    named_axes,
    with_axis_names,
)
from shardmap._jax.types import AnyMesh, Equation, Jaxpr, Var, aval_of, with_shape
from shardmap._jax.walk import equations_for, primitives_in, rewrite_jaxpr
from shardmap.map.collectives.rules import permutation_in_order
from shardmap.map.collectives.split import combines_all
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.map_primitive import is_no_map


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


def widen_bfloat16(equation: Equation) -> Any:
    """A reduction of bfloat16 as one in float32, with the conversions around it."""
    collective = COLLECTIVES.get(equation.primitive)
    if (
        collective is None
        or not collective.combiner
        or any(
            getattr(atom.aval, "dtype", None) != jnp.bfloat16
            for atom in equation.invars
        )
    ):
        return equation

    def wide(atoms: Sequence[Any]) -> list[Any]:
        float32 = np.dtype(np.float32)
        return [
            jex_core.Var(jax.core.ShapedArray(a.aval.shape, float32)) for a in atoms
        ]

    def converted(sources: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        dtypes = [aval_of(target).dtype for target in targets]
        return equations_for(
            lambda *values: [v.astype(d) for v, d in zip(values, dtypes, strict=True)],
            sources,
            targets,
            equation,
        )

    invars, outvars = wide(equation.invars), wide(equation.outvars)
    return [
        *converted(equation.invars, invars),
        equation.replace(invars=invars, outvars=outvars),
        *converted(outvars, equation.outvars),
    ]


def rename_axes(equation: Equation, names: Mapping[Hashable, Hashable]) -> Any:
    """A collective over other axes, by the new name of each."""
    if not names or not names.keys() & named_axes(equation):
        return equation
    effects = {
        with_axis(effect, names[axis_of(effect)])
        if axis_of(effect) in names
        else effect
        for effect in equation.effects
    }
    renamed = tuple(names.get(name, name) for name in axis_names(equation.params))
    return equation.replace(
        params=with_axis_names(equation.params, renamed), effects=effects
    )


def order_permutation(equation: Equation, mesh: AnyMesh) -> Any:
    """A permutation that names mesh axes in the order of the mesh.

    JAX numbers devices in the order of the mesh, whatever the order of the names.
    """
    if equation.primitive is not p.ppermute_p:
        return equation
    names = axis_names(equation.params)
    if not set(names) <= set(mesh.shape):
        return equation
    sizes = [mesh.shape[name] for name in names]
    pairs = equation.params["perm"]
    names, pairs = permutation_in_order(names, sizes, pairs, mesh.axis_names)
    return equation.replace(
        params=equation.params | {"axis_name": names, "perm": pairs}
    )


def without_sums_of_shared(
    jaxpr: Jaxpr, name: Hashable, size: int, differ: Collection[Var]
) -> Any:
    """``jaxpr`` with products instead of sums of what does not ``differ``."""

    def multiplied(x: jax.Array) -> jax.Array:
        # Half precision ends at 65,504, and integers wrap around as their sums do.
        half = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
        wide = np.dtype(np.float32) if half else x.dtype
        return (x.astype(wide) * np.asarray(size).astype(wide)).astype(x.dtype)

    def change(equation: Equation) -> Any:
        is_sum = equation.primitive is p.psum_p and combines_all(equation, name)
        if not is_sum:
            return equation
        [operand] = equation.invars
        if isinstance(operand, jex_core.Var) and operand in differ:
            return equation
        product, rest = over_other_axes(equation, name)
        return [*equations_for(multiplied, [operand], [product], equation), *rest]

    return rewrite_jaxpr(jaxpr, change, lambda equation: False)


def over_other_axes(equation: Equation, name: Hashable) -> tuple[Var, list[Any]]:
    """What is left of a sum over several axes after that over one of them.

    Gives its operand, which is the result if there is no other axis, and the equations.
    """
    [result] = equation.outvars
    others = tuple(n for n in axis_names(equation.params) if n != name)
    if not others:
        return result, []
    operand = jex_core.Var(aval_of(result))
    rest = equation.replace(
        invars=[operand],
        params=with_axis_names(equation.params, others),
        effects=without_axis(equation.effects, name),
    )
    return operand, [rest]


_REWRITTEN = frozenset([p.all_to_all_p, p.ppermute_p, REDUCE_SCATTER])


def for_shard_map(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr`` with collectives that `jax.shard_map` of this mesh has right."""
    if primitives_in(jaxpr).isdisjoint(_REWRITTEN):
        return jaxpr

    def change(equation: Equation) -> Any:
        return tiled(order_permutation(equation, mesh))

    # Maps inside were rewritten when they were traced.
    return rewrite_jaxpr(jaxpr, change, is_no_map)
