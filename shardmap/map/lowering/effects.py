"""Effects in a block of elements, such as host callbacks: once for each element.

Vectorised code computes a whole block, with its empty places. An equation with an
effect runs in a loop over the elements instead. JAX vectorises the control flow around
it: both branches of a `jax.lax.cond` run if elements choose differently, and a
`while_loop` runs for all elements until the last one ends.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import cond_p, while_p

from shardmap._jax.effects import DEBUG_EFFECT, has_external_effect, io_effects
from shardmap._jax.primitives import PURE_CALLBACK
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import Aval, Equation, Jaxpr, Primitive, Value
from shardmap._jax.walk import equations, jaxprs_in, primitives_in
from shardmap.map.collectives.split import is_collective
from shardmap.map.primitives.axis import AxisLayout, axis_text, pad_last
from shardmap.map.primitives.tap import tap_p


def has_effect(equation: Equation) -> bool:
    """Whether an equation, or one that it holds, has an effect outside."""
    return any(map(has_external_effect, equation.effects))


def calls_host(jaxpr: Jaxpr) -> bool:
    """Whether anything in ``jaxpr`` calls the host."""
    has_effect = any(map(has_external_effect, jaxpr.effects))
    return has_effect or PURE_CALLBACK in primitives_in(jaxpr)


per_element_callback_p = jex_core.Primitive("per_element_callback")
per_element_callback_p.multiple_results = True


def if_present(
    index: Value, size: int, call: Callable[..., list[Any]], *operands: Value
) -> list[Any]:
    """The results of a call for an element; zeros for an empty place."""

    def skip(*operands: Value) -> list[Any]:
        shapes = jax.eval_shape(call, *operands)
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    return lax.cond(index < size, call, skip, *operands)


def call_for_each(equation: Equation, axis: AxisLayout) -> Any:
    """An equation with an effect, in a loop over the elements of a block."""
    _check_control_flow(equation, axis)
    # A tap's jaxpr is there for JAX to look at; it is not run.
    holds_others = equation.primitive is not tap_p and jaxprs_in(equation.params)
    if (
        not has_effect(equation)
        or holds_others
        or equation.primitive is per_element_callback_p
        or is_collective(equation, axis.name)
    ):
        return equation
    return equation.replace(
        primitive=per_element_callback_p,
        params={
            "axis": axis,
            "what": equation.primitive,
            "params": tuple(equation.params.items()),
        },
    )


def _check_control_flow(equation: Equation, axis: AxisLayout) -> None:
    """Refuses what `jax.vmap` refuses, or computes wrongly."""
    in_condition = (
        equation.params["cond_jaxpr"].effects
        if equation.primitive is while_p
        else set()
    )
    # JAX's batching of loops ignores all of them but that of debugging.
    if any(map(has_external_effect, in_condition - {DEBUG_EFFECT})):
        what = "an ordered call of the host in the condition of a while_loop"
        remedy = "Call, or tap, in the loop's body"
    elif equation.primitive in (while_p, cond_p) and equation.effects & io_effects():
        what = f"jax.experimental.io_callback in a {equation.primitive}"
        remedy = "Use shardmap.tap, with result_shape= for what it returns"
    elif equation.primitive is while_p and _may_never_end(equation, axis):
        what = (
            "a tap with result_shape= in a while_loop, where a block has empty places"
        )
        remedy = "Use as many devices as divide the elements"
    else:
        return
    raise NotImplementedError(
        f"{what}, in a map over {axis_text(axis.name)} that vectorises {axis.block} of "
        f"{axis.size} elements: JAX cannot vectorise that. {remedy}, or give the map "
        "batch_size=1."
    )


def _may_never_end(loop: Equation, axis: AxisLayout) -> bool:
    """Whether a loop may never end for empty places, whose results are zeros."""
    is_partly_empty = bool(axis.padding and axis.device_axes)
    return is_partly_empty and any(
        equation.primitive is per_element_callback_p and equation.outvars
        for jaxpr in jaxprs_in(loop.params)
        for equation in equations(jaxpr)
    )


def _abstract_eval(
    *avals: Aval, axis: AxisLayout, what: Primitive, params: tuple[tuple[str, Any], ...]
) -> tuple[Sequence[Any], Any]:
    results, effects = what.abstract_eval(*avals, **dict(params))
    return results if what.multiple_results else [results], effects


def _batching_rule(
    vmap: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axis: AxisLayout,
    what: Primitive,
    params: tuple[tuple[str, Any], ...],
) -> tuple[list[Any], Sequence[int | None]]:
    assert vmap.name == axis.vectorized_name
    batched = [
        jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args, dims, strict=True)
        if dim is not None
    ]

    def element(elements: Sequence[Value]) -> list[Any]:
        index, *mapped = elements

        def call(*mapped: Value) -> list[Any]:
            rest = iter(mapped)
            operands = [
                arg if dim is None else next(rest)
                for arg, dim in zip(args, dims, strict=True)
            ]
            results = what.bind(*operands, **dict(params))
            return list(results) if what.multiple_results else [results]

        if axis.padding and axis.device_axes:
            return if_present(index, axis.size, call, *mapped)
        return call(*mapped)

    elements = [axis.indices(), *batched]
    if axis.device_axes:
        results = lax.map(element, elements)
    else:
        # Without a branch: XLA hangs on CPU where it partitions several with calls.
        results = lax.map(element, [array[: axis.size] for array in elements])
        results = [pad_last(result, axis.padding, 0) for result in results]
    return results, [0] * len(results)


per_element_callback_p.def_effectful_abstract_eval(_abstract_eval)
def_batching(per_element_callback_p, _batching_rule)
