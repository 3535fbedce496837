"""Effects of elements that share a device: each happens once for each element.

Vectorised code computes a block as a whole, its empty places too. What has an effect,
such as a host callback, is therefore taken out: it runs element by element, for those
that exist.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from shardmap.map.collectives import is_collective
from shardmap.map.primitive import happens_outside, spmap_p
from shardmap.map.rewriting import rewrite_jaxpr
from shardmap.map.split_axis import SplitAxis
from shardmap.map.tap_primitive import tap_p

each_p = jex_core.Primitive("for_each_element")
each_p.multiple_results = True


def has_effects(jaxpr: Any) -> bool:
    """Whether anything happens in ``jaxpr`` that is seen outside of it."""
    return any(happens_outside(e) for eqn in jaxpr.eqns for e in eqn.effects)


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
        # A tap's jaxpr is there for JAX to look at; it is not run.
        holds_jaxprs = equation.primitive is not tap_p and any(
            True for _ in jex_core.jaxprs_in_params(equation.params)
        )
        if (
            not any(map(happens_outside, equation.effects))
            or holds_jaxprs
            or equation.primitive in (spmap_p, each_p)
            or is_collective(equation, axis.name)
        ):
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


batching.fancy_primitive_batchers[each_p] = _batching_rule
