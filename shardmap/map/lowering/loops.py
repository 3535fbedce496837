"""Blocks of elements in a loop of vectorised parts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import axis_index_p, cond_p, scan_p, while_p

from shardmap._jax.collectives import axis_names
from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import (
    AnyJaxpr,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Param,
    Value,
)
from shardmap._jax.walk import jaxprs_in
from shardmap.map.collectives.final_reductions import refuse
from shardmap.map.collectives.loop_parts import loop_parts
from shardmap.map.collectives.split import (
    is_split_inside,
    split_collectives,
    split_p,
    uses_axis,
)
from shardmap.map.collectives.split_axis import SplitAxis
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.lowering.effects import if_present
from shardmap.map.lowering.host_calls import has_effect
from shardmap.map.primitives.evaluation import CALLS, evaluate
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.tracing import per_jaxpr, trace_body


def loop(
    jaxpr: Jaxpr,
    axis: SplitAxis,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    batch_size: int,
) -> Callable[..., list[Any]]:
    """A function of a device's blocks that runs ``batch_size`` elements at a time.

    Raises:
      ValueError: elements need a collective's result, so all would have to be there.
    """
    return _Loop(jaxpr, axis, in_axes, out_axes, batch_size).run


def _with_indices_inside(jaxpr: Jaxpr, axis: SplitAxis, batch_size: int) -> Any:
    """``jaxpr`` whose loops, branches and calls may ask for an element's index."""

    def change(equation: Equation) -> Any:
        alone = jaxpr.replace(eqns=[equation])
        asked = uses_axis(alone, axis.name)
        if not asked:
            return equation
        split = split_collectives(alone, axis)
        if not _asks_only_index(split):
            refuse(axis, batch_size, asked[0], f"in a {equation.primitive} in")
        return split.eqns[0]

    return jaxpr.replace(eqns=list(map(change, jaxpr.eqns)))


class _Loop:
    """One function of an element over one device's block of the axis."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        axis: SplitAxis,
        in_axes: Sequence[int | None],
        out_axes: Sequence[int | None],
        batch_size: int,
    ) -> None:
        parts = loop_parts(jaxpr, axis, in_axes, batch_size)
        before = _with_indices_inside(parts.before, axis, batch_size)
        self._parts = parts._replace(before=before)
        self._axis = axis
        self._reductions: list[Any] = [
            COLLECTIVES[equation.primitive].rule for equation in parts.reductions
        ]
        self._in_axes, self._out_axes = in_axes, out_axes
        self._batch_size = batch_size
        self._has_effect = any(map(has_effect, self._parts.before.eqns))
        self._needs_index = bool(
            self._has_effect or self._parts.reductions or self._parts.reads_index
        )

    def run(self, *blocks: Value) -> list[Any]:
        unmapped: list[Value] = []
        # XLA without Shardy cannot compile a device's number that nothing asks for.
        elements = [
            self._axis.indices()
            if self._needs_index
            else jnp.arange(self._axis.block, dtype=np.int32)
        ]
        for block, in_axis in zip(blocks, self._in_axes, strict=True):
            if in_axis is None:
                unmapped.append(block)
            else:
                elements.append(jnp.moveaxis(block, in_axis, 0))
        accumulated, results = self._scan(elements, unmapped)
        reduced = [
            reduction.finish(self._axis, value, axis_names(equation.params))
            for reduction, equation, value in zip(
                self._reductions, self._parts.reductions, accumulated, strict=True
            )
        ]
        once = jax.core.eval_jaxpr(self._parts.after, (), *reduced, *unmapped)
        count = self._parts.made_by.count("after")
        again = self._each_after([*once[count:], *unmapped])
        return self._placed(
            {"before": results, "after": once[:count], "each_after": again}
        )

    def _scan(
        self, elements: Sequence[Value], unmapped: Sequence[Value]
    ) -> tuple[Any, list[Any]]:
        """What is reduced, so far, and the results of all elements, stacked."""
        size = self._batch_size
        steps, left = divmod(self._axis.block, size)
        looped = steps * size

        def batch(accumulated: Any, given: Sequence[Any]) -> tuple[Any, list[Any]]:
            return self._batch(accumulated, given, unmapped)

        accumulated, stacked = lax.scan(
            batch,
            [
                reduction.start(equation.invars[0].aval)
                for reduction, equation in zip(
                    self._reductions, self._parts.reductions, strict=True
                )
            ],
            [
                array[:looped].reshape(steps, size, *array.shape[1:])
                for array in elements
            ],
        )
        results = [array.reshape(looped, *array.shape[2:]) for array in stacked]
        if left:
            last = [array[looped:] for array in elements]
            accumulated, more = batch(accumulated, last)
            results = [
                jnp.concatenate(pair) for pair in zip(results, more, strict=True)
            ]
        return accumulated, results

    def _batch(
        self,
        accumulated: Sequence[Value],
        given: Sequence[Any],
        unmapped: Sequence[Value],
    ) -> tuple[list[Any], list[Any]]:
        """One step: some elements' results, and what is reduced with them."""

        def element(index: Value, *mapped: Value) -> list[Any]:
            from_mapped, rest = iter(mapped), iter(unmapped)
            args = [
                next(rest if in_axis is None else from_mapped)
                for in_axis in self._in_axes
            ]
            before = self._parts.before
            if self._parts.reads_index_inside:
                return _evaluate_with_index(before, index, [index, *args])
            return jax.core.eval_jaxpr(before, (), index, *args)

        indices = given[0]
        if self._has_effect:
            results = lax.map(
                lambda args: if_present(args[0], self._axis.size, element, *args), given
            )
        elif self._batch_size == 1:
            alone = element(*(array[0] for array in given))
            results = [jnp.expand_dims(result, 0) for result in alone]
        else:
            results = jax.vmap(element)(*given)
        present = indices < self._axis.size
        count = len(self._reductions)
        combined = [
            reduction.accumulate(before, value, present)
            for reduction, before, value in zip(
                self._reductions, accumulated, results[:count], strict=True
            )
        ]
        return combined, results[count:]

    def _each_after(self, operands: Sequence[Value]) -> list[Any]:
        """The results of all elements, stacked, of what happens after a reduction."""
        after = self._parts.each_after
        if not after.eqns:
            return []

        def element(*operands: Value) -> list[Any]:
            return jax.core.eval_jaxpr(after, (), *operands)

        stacked: list[Any] = lax.map(
            lambda index: if_present(index, self._axis.size, element, *operands),
            self._axis.indices(),
        )
        return stacked

    def _placed(self, results: Mapping[str, Sequence[Value]]) -> list[Any]:
        """The results in their order, with the elements where ``out_axes`` says."""
        left = {maker: iter(values) for maker, values in results.items()}
        placed = []
        for out_axis, maker in zip(self._out_axes, self._parts.made_by, strict=True):
            value = next(left[maker])
            if maker == "after":
                if out_axis is not None:
                    value = jnp.expand_dims(value, out_axis)
                    value = jnp.repeat(value, self._axis.block, out_axis)
            elif out_axis is None:
                value = value[0]
            else:
                value = jnp.moveaxis(value, 0, out_axis)
            placed.append(value)
        return placed


# An element's index in loops, branches and maps inside: it is closed over there.

_HOLDERS = {*CALLS, while_p, cond_p, scan_p, spmap_p}


@per_jaxpr
def _asks_only_index(jaxpr: Jaxpr) -> bool:
    """Whether `axis_index` is the only collective, where it can be closed over."""
    for equation in jaxpr.eqns:
        if equation.primitive is split_p:
            if equation.params["collective"] is not axis_index_p:
                return False
        elif is_split_inside(equation):
            # JAX chooses branches for platforms.
            if (
                equation.primitive not in _HOLDERS
                or "branches_platforms" in equation.params
                or not all(map(_asks_only_index, jaxprs_in(equation.params)))
            ):
                return False
    return True


def _evaluate_with_index(
    jaxpr: AnyJaxpr, index: Value, args: Sequence[Any]
) -> list[Any]:
    """Evaluates ``jaxpr`` where `axis_index` is ``index``."""

    def inside(jaxpr: AnyJaxpr, *args: Value) -> list[Any]:
        return _evaluate_with_index(jaxpr, index, args)

    def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
        primitive, params = equation.primitive, equation.params
        if primitive is split_p:
            return [index]
        if primitive in CALLS or not is_split_inside(equation):
            return None
        if primitive is while_p:
            return _while(inside, operands, **params)
        if primitive is cond_p:
            return _cond(inside, operands, **params)
        if primitive is scan_p:
            return _scan(inside, operands, **params)
        return _map(index, operands, **params)

    return evaluate(jaxpr, args, rule)


Inside = Callable[..., list[Any]]
"""Evaluates a jaxpr with the index, for its operands."""


def _while(
    inside: Inside,
    operands: Sequence[Any],
    *,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> list[Any]:
    first = cond_nconsts + body_nconsts
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts:first]

    def goes_on(carry: Sequence[Any]) -> Any:
        [pred] = inside(cond_jaxpr, *cond_consts, *carry)
        return pred

    def step(carry: Sequence[Any]) -> list[Any]:
        return inside(body_jaxpr, *body_consts, *carry)

    [pred] = cond_jaxpr.out_avals
    if not pred.ndim:
        return lax.while_loop(goes_on, step, list(operands[first:]))

    # Of a vmap inside: its elements keep what they have when they have ended.
    def step_of_some(carry: Sequence[Any]) -> list[Any]:
        some = goes_on(carry)
        return [
            jnp.where(jnp.expand_dims(some, range(some.ndim, after.ndim)), after, b)
            for after, b in zip(step(carry), carry, strict=True)
        ]

    return lax.while_loop(
        lambda carry: goes_on(carry).any(), step_of_some, list(operands[first:])
    )


def _cond(
    inside: Inside, operands: Sequence[Any], *, branches: Sequence[Any], **_: object
) -> list[Any]:
    index, *rest = operands
    calls = [lambda *args, b=branch: inside(b, *args) for branch in branches]
    return lax.switch(index, calls, *rest)


def _scan(
    inside: Inside, operands: Sequence[Any], *, jaxpr: Jaxpr, **params: Param
) -> list[Any]:
    consts, carries = scan_counts(params)
    first = consts + carries

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = inside(jaxpr, *operands[:consts], *carry, *xs)
        return results[:carries], results[carries:]

    carry, stacked = lax.scan(
        step,
        list(operands[consts:first]),
        list(operands[first:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _map(index: Value, operands: Sequence[Any], **params: Param) -> list[Any]:
    jaxpr = params["call_jaxpr"]
    body = trace_body(
        lambda index, *args: _evaluate_with_index(jaxpr, index, args),
        [jax.typeof(index), *(var.aval for var in jaxpr.invars)],
        params["axis_name"],
        params["axis_size"],
    )
    changed = {
        "call_jaxpr": body.jaxpr,
        "in_axes": (None,) * (len(body.constants) + 1) + params["in_axes"],
    }
    return spmap_p.bind(*body.constants, index, *operands, **params | changed)
