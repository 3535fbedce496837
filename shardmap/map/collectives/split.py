"""Collectives over a mapped axis, ready for a block of its elements and for `jax.vmap`.

JAX vectorises the function of one element, control flow and all. For that the
collectives over the axis are replaced by equations of `block_collective_p`. Its
batching rule gets the whole block, and looks up what to do in the table.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as p
import jax.numpy as jnp
from jax.interpreters import mlir

from shardmap._jax.context import bound_axes
from shardmap._jax.effects import without_axis
from shardmap._jax.primitives import (
    COMPOSITE,
    CUSTOM_PARTITIONING,
    PURE_CALLBACK,
    SHARD_MAP,
    axis_names,
)
from shardmap._jax.references import with_index
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Aval, Equation, Jaxpr, Param, Primitive, aval_of
from shardmap._jax.walk import (
    equations,
    equations_for,
    equations_of,
    jaxprs_in,
    primitives_in,
    rewrite_in_context,
)
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.map_primitive import binds, spmap_p

block_collective_p = jex_core.Primitive("block_collective")
block_collective_p.multiple_results = True


def block_collective(equation: Equation, axis: AxisLayout) -> Any:
    """A collective over ``axis``, ready for a block of its elements."""
    is_ready = equation.primitive is block_collective_p
    if is_ready or not is_collective(equation, axis.name):
        return equation
    return equation.replace(
        primitive=block_collective_p,
        params={
            "axis": axis,
            "collective": equation.primitive,
            "params": tuple(sorted(equation.params.items())),
        },
        effects=without_axis(equation.effects, axis.name),
    )


def collectives_of(equation: Equation, name: Hashable) -> list[Any]:
    """The collectives over the axis that an equation is, or holds."""
    each = equations_of(equation, lambda equation: not binds(equation, name))
    return [equation for equation in each if is_collective(equation, name)]


def lowers_per_device(jaxpr: Jaxpr, name: Hashable, platform: str) -> bool:
    """Whether JAX lowers all collectives over the axis for one element per device.

    What a `jax.shard_map` holds has types with its mesh, which only vectorising makes
    anew.
    """
    if SHARD_MAP in primitives_in(jaxpr):
        return False
    each = equations(jaxpr, lambda equation: not binds(equation, name))
    return all(
        COLLECTIVES[equation.primitive].lowers_per_device(aval_of(atom), platform)
        for equation in each
        if is_collective(equation, name)
        for atom in equation.invars
    )


def is_collective(equation: Equation, name: Hashable) -> bool:
    """Whether the equation itself is a collective over the axis."""
    if equation.primitive is block_collective_p:
        return bool(equation.params["axis"].vectorized_name == name)
    return equation.primitive in COLLECTIVES and name in axis_names(equation.params)


def combines_all(equation: Equation, name: Hashable) -> bool:
    """Whether it reduces over the whole axis: all elements have its result."""
    return (
        equation.primitive in COLLECTIVES
        and is_collective(equation, name)
        and COLLECTIVES[equation.primitive].is_reduction
        and equation.params.get("axis_index_groups") is None
        and not any(isinstance(axis, int) for axis in axis_names(equation.params))
    )


def gives_all_the_same(equation: Equation) -> bool:
    """Whether all elements have the result of a collective."""
    primitive, params = equation.primitive, equation.params
    if primitive is block_collective_p:
        primitive, params = params["collective"], dict(params["params"])
    is_whole = params.get("axis_index_groups") is None
    return is_whole and COLLECTIVES[primitive].is_shared


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


def _abstract_eval(
    *avals: Aval, axis: AxisLayout, collective: Primitive, params: tuple[Any, ...]
) -> tuple[list[Any], Any]:
    with bound_axes({axis.name: axis.size}):
        results, effects = collective.abstract_eval(*avals, **dict(params))
    results = results if collective.multiple_results else [results]
    return list(results), without_axis(effects, axis.name)


block_collective_p.def_effectful_abstract_eval(_abstract_eval)
def_batching(block_collective_p, _batching_rule)


# What `jax.vmap` takes


def vectorized(
    jaxpr: Jaxpr, vmap: Vmap, in_dims: Sequence[int | None], out_dims: Any
) -> Callable[..., Any]:
    """`jax.vmap` of ``jaxpr``; all operands may be unmapped, and the axis unnamed.

    JAX's batching rules of collectives over the axis know no groups, mostly only one
    axis, and number the elements of a permutation over several axes wrongly.
    """
    name = vmap.name
    axis = AxisLayout(name, vmap.size, vectorized_name=name)

    def change(equation: Equation, where: tuple[bool, bool]) -> Any:
        is_our_axis, in_map = where
        if name is not None and is_our_axis:
            equation = block_collective(equation, axis)
        # Maps inside are made ready when they are vectorised.
        return equation if in_map else with_batching_rule(equation)

    def inside(equation: Equation, where: tuple[bool, bool]) -> tuple[bool, bool]:
        is_our_axis, in_map = where
        is_map = equation.primitive is spmap_p
        return is_our_axis and not binds(equation, name), in_map or is_map

    ready = rewrite_in_context(jaxpr, (True, False), change, inside)
    return vmap.vectorize(
        lambda *args: jax.core.eval_jaxpr(ready, (), *args), in_dims, out_dims
    )


def _grouped_batching_rule(
    _: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    split_axis: int,
    concat_axis: int,
    **params: Param,
) -> tuple[Any, int | None]:
    (x,), (dim,) = args, dims
    if dim is not None:
        x = jnp.moveaxis(x, dim, 0)
        split_axis, concat_axis = split_axis + 1, concat_axis + 1
    axes = {"split_axis": split_axis, "concat_axis": concat_axis}
    return p.all_to_all_p.bind(x, **axes, **params), None if dim is None else 0


grouped_p = jex_core.Primitive("grouped_all_to_all")
"""An all_to_all with groups, over other axes than the vectorised one."""

grouped_p.def_effectful_abstract_eval(p.all_to_all_p.abstract_eval)
def_batching(grouped_p, _grouped_batching_rule)
# A loop over single elements does not vectorise it.
mlir.register_lowering(grouped_p, mlir.lower_fun(p.all_to_all_p.bind, False))


def with_batching_rule(equation: Equation) -> Any:
    """An equation that `jax.vmap` knows.

    JAX has no rule for `custom_partitioning` and `jax.lax.composite`, which are for the
    function as it was written, for an all_to_all with groups, nor for a callback that
    does not say how it is vectorised; one that draws other numbers, see `_draws_alone`,
    and one that writes other ones, see `with_index`.
    """
    primitive, params = equation.primitive, equation.params
    if primitive is p.all_to_all_p and params["axis_index_groups"] is not None:
        return equation.replace(primitive=grouped_p)
    if primitive is p.closed_call_p:
        # JAX's type checker refuses those that JAX has vectorised.
        jaxpr = params["call_jaxpr"]
        jitted = jax.jit(jex_core.jaxpr_as_fun(jaxpr))
        return equations_for(jitted, equation.invars, equation.outvars, equation)
    if primitive is PURE_CALLBACK and params["vmap_method"] is None:
        return equation.replace(params=params | {"vmap_method": "sequential"})
    if primitive in (CUSTOM_PARTITIONING, COMPOSITE):
        [held] = jaxprs_in(params)
        plain = jax.jit(lambda *args: jax.core.eval_jaxpr(held, (), *args))
        return equations_for(plain, equation.invars, equation.outvars, equation)
    if _draws_alone(equation):
        draw = functools.partial(primitive.bind, **params)
        each = jax.custom_batching.sequential_vmap(draw)
        return equations_for(each, equation.invars, equation.outvars, equation)
    return with_index(equation)


_THREEFRY = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype.name
"""The dtype of keys whose numbers come of arithmetic, which is vectorised."""

_DRAWS = frozenset(
    [p.random_bits_p, p.random_fold_in_p, p.random_gamma_p, p.random_split_p]
)


def _draws_alone(equation: Equation) -> bool:
    """Whether what JAX draws for several keys at once is not what each key draws.

    So it is for XLA's generators, such as "rbg": the first element's key draws for all.
    """
    if equation.primitive is p.rng_bit_generator_p:
        return True
    if equation.primitive not in _DRAWS:
        return False
    return bool(aval_of(equation.invars[0]).dtype.name != _THREEFRY)
