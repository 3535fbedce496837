"""How the map behaves under grad, jvp, linearize and their compositions.

The jvp rule binds two maps: one for the results and the residuals, one, linear, from
residuals and tangents to the results' tangents. Reverse mode needs no rule for
partial evaluation then: the first map is known, the second is the one to transpose.
"""

import functools
from collections.abc import Hashable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
from jax.interpreters import ad

from shardmap._jax.types import (
    Jaxpr,
    Param,
    Value,
    aval_of,
    is_inexact,
    without_sharding,
)
from shardmap._jax.walk import per_jaxpr
from shardmap.map.differing import differing, is_in
from shardmap.map.primitives.map_primitive import MapPrimitive
from shardmap.map.rules.shared_values import (
    with_shared_results_marked,
    with_two_copies,
)
from shardmap.map.tracing import Body, bind_map, trace_body

# Forward mode


class _Linearized(NamedTuple):
    """The two maps of the jvp rule.

    Attributes:
      forward: returns the results, then the computed residuals.
      computed_axes: of these.
      residuals: the source of each residual, from `residual_sources`.
      tangent: takes the residuals and the nonzero tangents; returns the tangents of the
        inexact results.
    """

    forward: Body
    computed_axes: tuple[int | None, ...]
    residuals: tuple[tuple[str, int], ...]
    tangent: Body


def residual_sources(
    residuals: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], tuple[tuple[str, int], ...]]:
    """The residuals to compute, and the source of each residual.

    A source is ("operand", k), ("result", k) or ("computed", k).
    """
    computed: list[Any] = []
    sources = []
    for residual in residuals:
        for kind, known in (
            ("operand", operands),
            ("result", results),
            ("computed", computed),
        ):
            # By identity: a literal does not compare.
            place = [k for k, other in enumerate(known) if other is residual]
            if place:
                sources.append((kind, place[0]))
                break
        else:
            computed.append(residual)
            sources.append(("computed", len(computed) - 1))
    return computed, tuple(sources)


@per_jaxpr
def _linearize(
    jaxpr: Jaxpr,
    nonzero: tuple[bool, ...],
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    axis_name: Hashable,
    axis_size: int,
) -> _Linearized:
    jaxpr = with_shared_results_marked(jaxpr, axis_name, in_axes)
    avals = list(map(aval_of, jaxpr.invars))
    inexact = [is_inexact(aval_of(var)) for var in jaxpr.outvars]

    def forward(*primals: Value) -> Any:
        def differentiated(*active: Value) -> Any:
            rest = iter(active)
            merged = [
                next(rest) if nz else p for p, nz in zip(primals, nonzero, strict=True)
            ]
            results = jax.core.eval_jaxpr(jaxpr, (), *merged)
            return list(compress(results, inexact)), results

        active = compress(primals, nonzero)
        _, linear, results = jax.linearize(differentiated, *active, has_aux=True)
        return results, linear

    traced = trace_body(forward, avals, axis_name, axis_size)
    _, residual_tree = traced.out_tree.children()
    variables = traced.jaxpr.outvars[len(inexact) :]
    operands = traced.jaxpr.invars[len(traced.constants) :]
    results = traced.jaxpr.outvars[: len(inexact)]
    differ = differing(
        traced.jaxpr,
        axis_name,
        (
            *(False for _ in traced.constants),
            *(axis is not None for axis in in_axes),
        ),
    )
    # A residual that all elements share is one, though the result may not be.
    alike = [
        var if axis is None or is_in(var, differ) else None
        for var, axis in zip(results, out_axes, strict=True)
    ]
    computed, sources = residual_sources(variables, operands, alike)
    pruned = traced.jaxpr.replace(outvars=[*results, *computed])
    tangent_avals = [aval.to_tangent_aval() for aval in compress(avals, nonzero)]

    def tangent(residuals: Value, tangents: Sequence[Value]) -> Any:
        return jax.tree.unflatten(residual_tree, residuals)(*tangents)

    residual_avals = [variable.aval for variable in variables]
    count = len(residual_avals)
    tangent_body = trace_body(
        lambda *args: tangent(args[:count], args[count:]),
        [*residual_avals, *tangent_avals],
        axis_name,
        axis_size,
    )
    axes = tuple(0 if is_in(var, differ) else None for var in computed)
    return _Linearized(traced._replace(jaxpr=pruned), axes, sources, tangent_body)


def _is_zero(tangent: Value) -> bool:
    if isinstance(tangent, ad.Zero):
        return True
    return bool(jax.typeof(tangent).dtype == jax.dtypes.float0)


def _jvp_rule(
    primitive: MapPrimitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    call_jaxpr: Jaxpr,
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    **params: Param,
) -> tuple[list[Any], list[Any]]:
    nonzero = tuple(not _is_zero(tangent) for tangent in tangents)
    if not any(nonzero):
        results = primitive.bind(
            *primals,
            call_jaxpr=call_jaxpr,
            in_axes=in_axes,
            out_axes=out_axes,
            **params,
        )
        return results, [_zero_tangent(result) for result in results]

    linearized = _linearize(
        call_jaxpr,
        nonzero,
        in_axes,
        out_axes,
        params["axis_name"],
        params["axis_size"],
    )
    computed_axes = linearized.computed_axes
    values = bind_map(
        linearized.forward,
        primals,
        in_axes,
        out_axes + computed_axes,
        params,
        primitive,
    )
    results, residuals = values[: len(out_axes)], values[len(out_axes) :]

    known = {
        "operand": list(zip(primals, in_axes, strict=True)),
        "result": list(zip(results, out_axes, strict=True)),
        "computed": list(zip(residuals, computed_axes, strict=True)),
    }
    linear = [known[kind][k] for kind, k in linearized.residuals]
    linear += compress(zip(tangents, in_axes, strict=True), nonzero)
    inexact = [is_inexact(aval_of(var)) for var in call_jaxpr.outvars]
    tangents_out = iter(
        bind_map(
            linearized.tangent,
            [value for value, _ in linear],
            [axis for _, axis in linear],
            compress(out_axes, inexact),
            params,
            primitive,
        )
    )
    return results, [
        next(tangents_out) if i else _zero_tangent(result)
        for result, i in zip(results, inexact, strict=True)
    ]


def _zero_tangent(result: Value) -> ad.Zero:
    return ad.Zero(jax.typeof(result).to_tangent_aval())


# Reverse mode


@per_jaxpr
def _transpose(
    jaxpr: Jaxpr,
    linear: tuple[bool, ...],
    nonzero: tuple[bool, ...],
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    axis_name: Hashable,
    axis_size: int,
) -> Body:
    """The map from residuals and cotangents of results to cotangents of operands.

    Args:
      jaxpr: the function of one element.
      linear: which operands are to have a cotangent.
      nonzero: which results have a cotangent.
      in_axes, out_axes, axis_name, axis_size: of the map.
    """
    avals = list(map(aval_of, jaxpr.invars))
    residual_avals = list(compress(avals, [not is_linear for is_linear in linear]))
    linear_avals = list(map(without_sharding, compress(avals, linear)))
    cotangent_avals = list(compress(map(aval_of, jaxpr.outvars), nonzero))

    def transposed(*args: Value) -> Sequence[Any]:
        residuals = args[: len(residual_avals)]
        wanted = jaxpr.replace(outvars=list(compress(jaxpr.outvars, nonzero)))
        copied = with_two_copies(
            wanted,
            axis_name,
            axis_size,
            in_axes,
            list(compress(out_axes, nonzero)),
            linear,
        )

        def fun(*operands: Value) -> list[Any]:
            known, unknown = iter(residuals), iter(operands)
            merged = [next(unknown) if lin else next(known) for lin in linear]
            return jax.core.eval_jaxpr(copied, (), *merged)

        cotangents = list(args[len(residual_avals) :])
        return jax.linear_transpose(fun, *linear_avals)(cotangents)

    return trace_body(
        transposed, [*residual_avals, *cotangent_avals], axis_name, axis_size
    )


def _transpose_rule(
    primitive: MapPrimitive,
    cotangents: Sequence[Any],
    *args: Value,
    call_jaxpr: Jaxpr,
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    **params: Param,
) -> list[Any]:
    linear = tuple(isinstance(arg, ad.UndefinedPrimal) for arg in args)
    nonzero = tuple(not _is_zero(ct) for ct in cotangents)
    if not any(nonzero):
        return [
            ad.Zero(a.aval) if lin else None
            for a, lin in zip(args, linear, strict=True)
        ]
    body = _transpose(
        call_jaxpr,
        linear,
        nonzero,
        in_axes,
        out_axes,
        params["axis_name"],
        params["axis_size"],
    )
    is_residual = [not is_linear for is_linear in linear]
    results = bind_map(
        body,
        [*compress(args, is_residual), *compress(cotangents, nonzero)],
        [*compress(in_axes, is_residual), *compress(out_axes, nonzero)],
        compress(in_axes, linear),
        params,
        primitive,
    )
    given = iter(results)
    return [next(given) if lin else None for lin in linear]


def register(primitive: MapPrimitive) -> None:
    """Registers the rules of `jax.jvp` and of transposition."""
    ad.primitive_jvps[primitive] = functools.partial(_jvp_rule, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose_rule, primitive)
