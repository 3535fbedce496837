"""Effects of elements that share a device: each happens once for each element.

Vectorised code computes a block as a whole, its empty places too. What has an effect,
such as a host callback, is therefore taken out: it runs element by element, for those
that exist. And where devices are replicas of each other, the first one does it for all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching, mlir

from shardmap._jax.typechecks import register_typecheck, type_equation
from shardmap.map.collectives import is_collective
from shardmap.map.names import REPLICAS
from shardmap.map.primitive import happens_outside, spmap_p
from shardmap.map.rewriting import rewrite_jaxpr
from shardmap.map.split_axis import SplitAxis
from shardmap.map.tap_primitive import tap_p
from shardmap.map.tracing import shape_dtype_struct

each_p = jex_core.Primitive("for_each_element")
each_p.multiple_results = True


def has_effects(jaxpr: Any) -> bool:
    """Whether anything happens in ``jaxpr`` that is seen outside of it."""
    return any(happens_outside(e) for eqn in jaxpr.eqns for e in eqn.effects)


def _happens_here(equation: Any) -> bool:
    """Whether an equation has an effect, and not only holds others that have."""
    if not any(map(happens_outside, equation.effects)):
        return False
    if equation.primitive in (spmap_p, each_p):
        return False
    # A tap's jaxpr is there for JAX to look at; it is not run.
    jaxprs = jex_core.jaxprs_in_params(equation.params)
    return equation.primitive is tap_p or not any(True for _ in jaxprs)


def if_present(
    index: Any, size: int, call: Callable[..., list[Any]], *operands: Any
) -> list[Any]:
    """Calls for an element that exists; gives zeros for one that does not."""

    def skip(*operands: Any) -> list[Any]:
        shapes = jax.eval_shape(call, *operands)
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    return lax.cond(index < size, call, skip, *operands)


def call_for_each(jaxpr: Any, axis: SplitAxis) -> Any:
    """``jaxpr`` whose effects, in a block of ``axis``, happen element by element."""

    def change(equation: Any, shadowed: bool) -> Any:
        if not _happens_here(equation) or is_collective(equation, axis.name):
            return equation
        return equation.replace(
            primitive=each_p,
            params={
                "axis": axis,
                "primitive": equation.primitive,
                "params": tuple(equation.params.items()),
            },
        )

    return rewrite_jaxpr(jaxpr, axis.name, change)


def _batching_rule(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axis: SplitAxis,
    primitive: Any,
    params: tuple[tuple[str, Any], ...],
) -> tuple[list[Any], list[int]]:
    assert axis_data.name == axis.vectorized_name
    batched = [
        jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args, dims, strict=True)
        if dim is not None
    ]

    def call(*given: Any) -> list[Any]:
        rest = iter(given)
        operands = [
            arg if dim is None else next(rest)
            for arg, dim in zip(args, dims, strict=True)
        ]
        results = primitive.bind(*operands, **dict(params))
        return list(results) if primitive.multiple_results else [results]

    def element(given: Any) -> list[Any]:
        index, *operands = given
        if not axis.padding:
            return call(*operands)
        return if_present(index, axis.size, call, *operands)

    results = lax.map(element, [axis.indices(), *batched])
    return results, [0] * len(results)


def _typecheck(
    *operands: Any, axis: SplitAxis, primitive: Any, params: tuple[tuple[str, Any], ...]
) -> tuple[Any, Any]:
    return type_equation(primitive, operands, dict(params))


batching.fancy_primitive_batchers[each_p] = _batching_rule
register_typecheck(each_p, _typecheck)


# Replicas

once_p = jex_core.Primitive("on_first_replica")
once_p.multiple_results = True


def on_first_replica(jaxpr: Any) -> Any:
    """``jaxpr`` whose effects happen on the first replica only.

    Those of the maps inside are left alone, until these are lowered.
    """

    def change(equation: Any, shadowed: bool) -> Any:
        if not _happens_here(equation):
            return equation
        params = {
            "effect": equation.primitive,
            "params": tuple(equation.params.items()),
        }
        return equation.replace(primitive=once_p, params=params)

    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)


def _once_abstract_eval(
    *avals: Any, effect: Any, params: tuple[tuple[str, Any], ...]
) -> tuple[Any, Any]:
    def call(*operands: Any) -> Any:
        return effect.bind(*operands, **dict(params))

    closed = jax.make_jaxpr(call)(*map(shape_dtype_struct, avals))
    return closed.out_avals, closed.effects


def _once_typecheck(
    *operands: Any, effect: Any, params: tuple[tuple[str, Any], ...]
) -> tuple[Any, Any]:
    return type_equation(effect, operands, dict(params))


def _once_lowering(
    ctx: Any, *args: Any, effect: Any, params: tuple[tuple[str, Any], ...]
) -> Any:
    def call(*operands: Any) -> list[Any]:
        results = effect.bind(*operands, **dict(params))
        return list(results) if effect.multiple_results else [results]

    def run(*operands: Any) -> list[Any]:
        results = if_present(lax.axis_index(REPLICAS), 1, call, *operands)
        gathered = [
            lax.all_gather(result[None], REPLICAS, tiled=True) for result in results
        ]
        return [copies[0] for copies in gathered]

    inner = ctx.replace(tokens_out=None)
    results = mlir.lower_fun(run)(inner, *args)
    ctx.set_tokens_out(inner.tokens_out)
    return results


once_p.def_effectful_abstract_eval(_once_abstract_eval)
mlir.register_lowering(once_p, _once_lowering)
register_typecheck(once_p, _once_typecheck)
