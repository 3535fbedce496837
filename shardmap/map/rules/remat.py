"""The remat rule of maps: policies of `jax.checkpoint` apply inside them.

The map is split in two. The forward one returns the values that the policy saves, the
backward one computes the others again. JAX's rule for nested `jax.checkpoint` splits
the function of one element.
"""

import dataclasses
import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax
import jax.extend.core as jex_core

from shardmap._jax.context import NO_MESH, bound_axes
from shardmap._jax.primitives import remat_params
from shardmap._jax.rules import Policy, Split, def_partial_eval_custom, split_checkpoint
from shardmap._jax.types import Equation, Jaxpr
from shardmap._jax.walk import per_jaxpr
from shardmap.map.differing import differing, is_in
from shardmap.map.primitives.map_primitive import MapParams, insert_axis, spmap_p
from shardmap.map.rules.differentiation import residual_sources

_remat_p = jex_core.primitives.remat_p


def _split_rule(
    policy: Policy,
    unknown_in: Sequence[bool],
    available_in: Sequence[bool],
    equation: Equation,
) -> Split:
    """Splits a map into a forward and a backward one; see `SplitRule`."""
    params = MapParams.of(equation)
    element = equation.replace(
        primitive=_remat_p, params={**remat_params(), "jaxpr": params.call_jaxpr}
    )
    # JAX checks and traces parts of the element.
    with (
        bound_axes({params.axis_name: params.axis_size}),
        jax.sharding.use_abstract_mesh(NO_MESH),
    ):
        split: Any = split_checkpoint(policy, unknown_in, available_in, element)
    known, staged, unknown_out, available_out, _ = split

    ins: list[Any] = list(zip(equation.invars, params.in_axes, strict=True))
    outs: list[Any] = list(zip(equation.outvars, params.out_axes, strict=True))
    operands = list(compress(ins, map(operator.not_, unknown_in)))
    results = list(compress(outs, map(operator.not_, unknown_out)))
    mapped = tuple(axis is not None for _, axis in operands)
    differ = differing(known.params["jaxpr"], params.axis_name, mapped)
    jaxpr, sources = _without_copies(
        known.params["jaxpr"],
        tuple(
            not isinstance(var, jex_core.DropVar)
            # A residual that all elements share is one, though the result is not.
            and (axis is None or is_in(of_element, differ))
            for (var, axis), of_element in zip(
                results, known.params["jaxpr"].outvars, strict=False
            )
        ),
    )
    axes = [0 if is_in(v, differ) else None for v in jaxpr.outvars[len(results) :]]
    computed = [
        (jex_core.Var(insert_axis(v.aval, params.axis_size, axis)), axis)
        for v, axis in zip(jaxpr.outvars[len(results) :], axes, strict=True)
    ]
    known_by = {"operand": operands, "result": results, "computed": computed}
    residuals = [known_by[kind][k] for kind, k in sources]
    available = list(compress(ins, available_in))
    forward = _map_of(equation, jaxpr, operands, [*results, *computed])
    backward = _map_of(
        equation,
        staged.params["jaxpr"],
        [*residuals, *available],
        list(compress(outs, available_out)),
    )
    at_hand = [v for v, _ in available]
    saved = [
        v for v, _ in residuals if isinstance(v, jex_core.Var) and v not in at_hand
    ]
    saved = list(dict.fromkeys(saved))
    return Split(forward, backward, unknown_out, available_out, saved)


@per_jaxpr
def _without_copies(
    jaxpr: Jaxpr, kept: tuple[bool, ...]
) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """The forward part with only the residuals to compute, and the source of each.

    ``kept`` marks the results that are used. Residuals come after all results.
    """
    results, residuals = jaxpr.outvars[: len(kept)], jaxpr.outvars[len(kept) :]
    computed, sources = residual_sources(
        residuals,
        jaxpr.invars,
        [v if k else None for v, k in zip(results, kept, strict=True)],
    )
    return jaxpr.replace(outvars=[*results, *computed]), sources


def _map_of(
    equation: Equation,
    jaxpr: Jaxpr,
    operands: Sequence[tuple[Any, int | None]],
    results: Sequence[tuple[Any, int | None]],
) -> Any | None:
    """The map of a part; None without results and effects."""
    params = dataclasses.replace(
        MapParams.of(equation),
        call_jaxpr=jaxpr,
        in_axes=tuple(axis for _, axis in operands),
        out_axes=tuple(axis for _, axis in results),
    ).as_dict()
    _, effects = spmap_p.abstract_eval(*(v.aval for v, _ in operands), **params)
    if not results and not effects:
        return None
    return equation.replace(
        invars=[v for v, _ in operands],
        outvars=[v for v, _ in results],
        params=params,
        effects=effects,
    )


def_partial_eval_custom(spmap_p, _split_rule)
