"""Effects of elements that share a device: each happens once for each element.

Vectorised code computes a block as a whole, its empty places too, and both branches of
a `jax.lax.cond` if elements choose differently. What has an effect, such as a host
callback, is therefore taken out: it runs element by element, for those that exist, and
so do the loops and branches around it whose steps differ between elements.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import axis_index_p, cond_p, scan_p, while_p

from shardmap._jax.effects import io_effects
from shardmap._jax.primitives import scan_counts
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.typechecks import register_typecheck, type_equation
from shardmap._jax.types import (
    AnyJaxpr,
    AnyMesh,
    Aval,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Param,
    Primitive,
    Value,
)
from shardmap._jax.walk import jaxprs_in
from shardmap.map.collectives.split import is_collective, split_p
from shardmap.map.collectives.split_axis import SplitAxis
from shardmap.map.layout import MeshWalk
from shardmap.map.lowering.host_calls import happens_here, has_effect
from shardmap.map.primitives.axis import axis_text
from shardmap.map.primitives.evaluation import CALLS, evaluate
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.rewriting import rewrite_jaxpr
from shardmap.map.primitives.tap import tap_p
from shardmap.map.rules.while_loops import with_condition_in_body
from shardmap.map.tracing import (
    Batch,
    batched_results_of,
    per_jaxpr,
    trace_body,
    vectorize_some,
)

each_p = jex_core.Primitive("for_each_element")
each_p.multiple_results = True


def if_present(
    index: Value, size: int, call: Callable[..., list[Any]], *operands: Value
) -> list[Any]:
    """Calls for an element that exists; gives zeros for one that does not."""

    def skip(*operands: Value) -> list[Any]:
        shapes = jax.eval_shape(call, *operands)
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    return lax.cond(index < size, call, skip, *operands)


def call_for_each(jaxpr: Jaxpr, axis: SplitAxis) -> Any:
    """``jaxpr`` whose effects, in a block of ``axis``, happen element by element."""

    def change(equation: Equation, shadowed: bool) -> Any:
        is_control = equation.primitive in (while_p, cond_p)
        if (
            not (happens_here(equation) or (is_control and has_effect(equation)))
            or equation.primitive is each_p
            or is_collective(equation, axis.name)
        ):
            return equation
        return equation.replace(
            primitive=each_p,
            params={
                "axis": axis,
                "what": equation.primitive,
                "params": tuple(equation.params.items()),
            },
        )

    return rewrite_jaxpr(jaxpr, axis.name, change)


def _abstract_eval(
    *avals: Aval, axis: SplitAxis, what: Primitive, params: tuple[tuple[str, Any], ...]
) -> tuple[Sequence[Any], Any]:
    results, effects = what.abstract_eval(*avals, **dict(params))
    return results if what.multiple_results else [results], effects


def _batching_rule(
    vmap: Vmap,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    axis: SplitAxis,
    what: Primitive,
    params: tuple[tuple[str, Any], ...],
) -> tuple[list[Any], Sequence[int | None]]:
    assert vmap.name == axis.vectorized_name
    given = dict(params)
    if what in (while_p, cond_p):
        batch = Batch(vmap.name, vmap.size)
        # JAX does not vectorise these effects in control flow, whatever differs.
        refused = io_effects() & set().union(
            *(jaxpr.effects for jaxpr in jaxprs_in(given))
        )
        if not can_be_alone(given, axis):
            if refused:
                raise NotImplementedError(
                    f"jax.experimental.io_callback inside a {what} together with a "
                    f"collective over {axis_text(axis.name)}, of whose {axis.size} "
                    f"elements one device computes {axis.block}: JAX cannot vectorise "
                    "that. Use shardmap.tap, with result_shape for what it returns, or "
                    "as many devices as elements."
                )
            return vectorize_some(_together(what, given), batch, args, dims)
        if not refused and not _steps_differ(what, given, batch, args, dims):
            return vectorize_some(_together(what, given), batch, args, dims)
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
            return _Alone(axis, index).run(what, given, operands)

        if not axis.padding:
            return call(*mapped)
        return if_present(index, axis.size, call, *mapped)

    results = lax.map(element, [axis.indices(), *batched])
    return results, [0] * len(results)


def _typecheck(
    *operands: Value,
    axis: SplitAxis,
    what: Primitive,
    params: tuple[tuple[str, Any], ...],
) -> tuple[Any, Any]:
    return type_equation(what, operands, dict(params))


each_p.def_effectful_abstract_eval(_abstract_eval)
def_batching(each_p, _batching_rule)
register_typecheck(each_p, _typecheck)


# Loops and branches


def _together(primitive: Primitive, params: dict[str, Any]) -> Callable[..., list[Any]]:
    """The equation for a block whose elements all take the same steps."""
    if primitive is while_p and params["cond_jaxpr"].effects:
        return with_condition_in_body(**params)
    return lambda *operands: primitive.bind(*operands, **params)


def _steps_differ(
    primitive: Primitive,
    params: dict[str, Any],
    batch: Batch,
    args: Sequence[Any],
    dims: Sequence[int | None],
) -> bool:
    """Whether elements may take different branches, or different numbers of steps."""
    if primitive is cond_p:
        return dims[0] is not None
    condition = params["cond_jaxpr"]
    consts = params["cond_nconsts"]

    def goes_on(*operands: Value) -> list[Any]:
        # As it is batched after the loop, and so all the way.
        carry = while_p.bind(*operands, **params)
        return jax.core.eval_jaxpr(
            condition.jaxpr, condition.consts, *operands[:consts], *carry
        )

    [is_batched] = batched_results_of(goes_on, batch, args, dims)
    return is_batched


def _is_for(equation: Equation, axis: SplitAxis) -> bool:
    """Whether the equation itself is one that a block of ``axis`` has rules for."""
    return equation.primitive in (each_p, split_p) and equation.params["axis"] == axis


def _inside(equation: Equation) -> list[Any]:
    """The jaxprs that an equation holds, and runs."""
    params = equation.params
    if equation.primitive is each_p:
        params = dict(params["params"])
    return jaxprs_in(params)


def _holds(equation: Equation, axis: SplitAxis) -> bool:
    """Whether an equation is for a block of ``axis``, or holds one that is."""
    return _is_for(equation, axis) or any(
        _has_some(jaxpr, axis) for jaxpr in _inside(equation)
    )


@per_jaxpr
def _has_some(jaxpr: Jaxpr, axis: SplitAxis) -> bool:
    return any(_holds(equation, axis) for equation in jaxpr.eqns)


_TAKEN_APART = {*CALLS, while_p, cond_p, scan_p, spmap_p, each_p}


def evaluate_alone(
    jaxpr: AnyJaxpr, axis: SplitAxis, index: Value, args: Sequence[Any]
) -> list[Any]:
    """Evaluates what is for a block of ``axis`` for one element, by its index."""
    return _Alone(axis, index)._evaluate(jaxpr, args)


def can_be_alone(params: Mapping[str, Any], axis: SplitAxis) -> bool:
    """Whether one element needs no other to compute what the jaxprs say."""
    return all(_is_alone(jaxpr, axis) for jaxpr in jaxprs_in(params))


@per_jaxpr
def _is_alone(jaxpr: Jaxpr, axis: SplitAxis) -> bool:
    for equation in jaxpr.eqns:
        if not _holds(equation, axis):
            continue
        if equation.primitive is split_p:
            if equation.params["collective"] is not axis_index_p:
                return False
            continue
        given = equation.params
        if equation.primitive is each_p:
            given = dict(given["params"])
        elif equation.primitive not in _TAKEN_APART:
            return False
        # Branches for platforms are chosen by JAX.
        if "branches_platforms" in given or not can_be_alone(given, axis):
            return False
    return True


class _Alone:
    """How equations for a block of an axis run for one of its elements."""

    def __init__(self, axis: SplitAxis, index: Value) -> None:
        self._axis = axis
        self._index = index

    def run(
        self, primitive: Primitive, params: dict[str, Any], operands: Sequence[Any]
    ) -> list[Any]:
        """What an equation gives for this element."""
        if primitive is each_p:
            return self.run(params["what"], dict(params["params"]), operands)
        if primitive is split_p:
            return [self._index]
        if primitive is while_p:
            return self._while(operands, **params)
        if primitive is cond_p:
            return self._cond(operands, **params)
        if primitive is scan_p:
            return self._scan(operands, **params)
        if primitive is spmap_p:
            return self._map(operands, **params)
        if primitive is tap_p and params["mesh"] is not None and self._axis.laid_over:
            return self._tap(operands, **params)
        results = primitive.bind(*operands, **params)
        return list(results) if primitive.multiple_results else [results]

    def _tap(
        self,
        operands: Sequence[Any],
        *,
        mesh: AnyMesh,
        mesh_axes: tuple[tuple[str, ...], ...],
        **params: Param,
    ) -> list[Any]:
        """A tap that is told which device this element is laid on."""
        names = self._axis.laid_over
        block = MeshWalk(names, ()).spread(mesh, self._axis.size).block
        return tap_p.bind(
            self._index // block,
            *operands,
            mesh=mesh,
            mesh_axes=(names, *mesh_axes),
            **params,
        )

    def _evaluate(self, jaxpr: AnyJaxpr, args: Sequence[Any]) -> list[Any]:
        def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
            if equation.primitive in CALLS or not _holds(equation, self._axis):
                return None
            return self.run(equation.primitive, equation.params, operands)

        return evaluate(jaxpr, args, rule)

    def _while(
        self,
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
            [pred] = self._evaluate(cond_jaxpr, [*cond_consts, *carry])
            return pred

        def step(carry: Sequence[Any]) -> list[Any]:
            return self._evaluate(body_jaxpr, [*body_consts, *carry])

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
        self, operands: Sequence[Any], *, branches: Sequence[Any], **_: object
    ) -> list[Any]:
        index, *rest = operands
        return lax.switch(
            index,
            [lambda *args, b=branch: self._evaluate(b, args) for branch in branches],
            *rest,
        )

    def _scan(
        self, operands: Sequence[Any], *, jaxpr: Jaxpr, **params: Param
    ) -> list[Any]:
        consts, carries = scan_counts(params)

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self._evaluate(jaxpr, [*operands[:consts], *carry, *xs])
            return results[:carries], results[carries:]

        first = consts + carries
        carry, stacked = lax.scan(
            step,
            list(operands[consts:first]),
            list(operands[first:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    def _map(self, operands: Sequence[Any], **params: Param) -> list[Any]:
        jaxpr, axis = params["call_jaxpr"], self._axis
        body = trace_body(
            lambda index, *args: _Alone(axis, index)._evaluate(jaxpr, args),
            [jax.typeof(self._index), *(var.aval for var in jaxpr.invars)],
            params["axis_name"],
            params["axis_size"],
        )
        changed = {
            "call_jaxpr": body.jaxpr,
            "in_axes": (None,) * (len(body.constants) + 1) + params["in_axes"],
        }
        return spmap_p.bind(*body.constants, self._index, *operands, **params | changed)
