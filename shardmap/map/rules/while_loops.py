"""While loops whose condition has effects, under vectorisation.

JAX vectorises a while loop by running it until no element goes on, and keeps what
elements that have ended had. Where the condition has ordered effects it forgets to
keep: the loop is lowered in another way, and elements that have ended go on. So such
loops are first brought into the form that JAX takes right, with the effects of the
condition in the body.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.extend.core.primitives import while_p

from shardmap._jax.effects import TAP_EFFECT
from shardmap._jax.rules import Vmap, vectorize_loops
from shardmap._jax.types import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Param,
    Value,
    without_sharding,
)
from shardmap.map.primitives.rewriting import rewrite_jaxpr
from shardmap.map.primitives.tap import is_tapped, tap_p
from shardmap.map.tracing import Batch, vectorize_some


def with_condition_in_body(
    *,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> Callable[..., list[Any]]:
    """The loop of a while equation, its condition computed at the end of each step.

    Args:
      cond_nconsts, cond_jaxpr, body_nconsts, body_jaxpr: the equation's parameters.

    Returns:
      A function of the equation's operands.
    """
    first = cond_nconsts + body_nconsts
    step = _step_and_condition(cond_nconsts, cond_jaxpr, body_nconsts, body_jaxpr)
    goes_on = jax.make_jaxpr(lambda pred, *_: pred)(
        *(without_sharding(var.aval) for var in step.jaxpr.invars[first:])
    )

    def run(*operands: Value) -> list[Any]:
        start = jax.core.eval_jaxpr(
            cond_jaxpr.jaxpr,
            cond_jaxpr.consts,
            *operands[:cond_nconsts],
            *operands[first:],
        )
        _, *results = while_p.bind(
            *operands[:first],
            *start,
            *operands[first:],
            cond_nconsts=0,
            cond_jaxpr=goes_on,
            body_nconsts=first,
            body_jaxpr=step,
        )
        return results

    return run


def _step_and_condition(
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> Any:
    """A closed jaxpr from all constants, any boolean and the carry to the next two.

    Put together, not traced: what the jaxprs hold may be for certain rules only.
    """
    condition, body = (
        rewrite_jaxpr(closed.jaxpr, None, lambda e, _: e, retype=lambda aval: aval)
        for closed in (cond_jaxpr, body_jaxpr)
    )
    pred = jex_core.Var(condition.outvars[0].aval)
    carry = body.invars[body_nconsts:]
    keep = jax.make_jaxpr(functools.partial(_after_step, len(carry)))(
        *(without_sharding(atom.aval) for atom in (pred, *carry, *carry))
    ).jaxpr
    known: dict[Any, Any] = {}

    def follow(jaxpr: Jaxpr, inputs: Sequence[Any], atoms: Iterable[Any]) -> list[Any]:
        """Notes what ``inputs`` are; gives the equations with that instead."""
        known.update(zip(inputs, atoms, strict=True))
        return [e.replace(invars=list(map(after, e.invars))) for e in jaxpr.eqns]

    def after(atom: Atom) -> Any:
        is_known = not isinstance(atom, jex_core.Literal) and atom in known
        return known[atom] if is_known else atom

    equations = [
        *body.eqns,
        *follow(keep, keep.invars, [pred, *body.outvars, *carry]),
        *follow(condition, condition.invars[cond_nconsts:], map(after, keep.outvars)),
    ]
    invars = [
        *condition.invars[:cond_nconsts],
        *body.invars[:body_nconsts],
        pred,
        *carry,
    ]
    outvars = list(map(after, [*condition.outvars, *keep.outvars]))
    # Only for a jaxpr with as many inputs and outputs, as JAX keeps their names.
    closed = jax.make_jaxpr(lambda *args: [args[0] for _ in outvars])(
        *(without_sharding(var.aval) for var in invars)
    )
    return closed.replace(
        jaxpr=closed.jaxpr.replace(
            constvars=[*condition.constvars, *body.constvars],
            invars=invars,
            outvars=outvars,
            eqns=equations,
            effects=condition.effects | body.effects,
        ),
        consts=[*cond_jaxpr.consts, *body_jaxpr.consts],
    )


def _after_step(count: int, pred: Value, *carries: Value) -> list[Any]:
    """The carry after a step, or as before where a loop has ended."""
    return [
        jnp.where(jnp.expand_dims(pred, range(pred.ndim, after.ndim)), after, before)
        for after, before in zip(carries[:count], carries[count:], strict=True)
    ]


def without_taps_in_loops(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` of tangents without the taps of values in its while loops.

    JAX computes the tangents of a while loop together with its values once more.
    """

    def drop(equation: Equation, shadowed: bool) -> Any:
        is_plain = equation.primitive is tap_p and not equation.outvars
        return [] if is_plain else equation

    def change(equation: Equation, shadowed: bool) -> Any:
        if equation.primitive is not while_p or TAP_EFFECT not in equation.effects:
            return equation
        inside = {
            key: rewrite_jaxpr(equation.params[key], None, drop)
            for key in ("cond_jaxpr", "body_jaxpr")
        }
        is_left = any(map(is_tapped, inside.values()))
        return equation.replace(
            params=equation.params | inside,
            effects=equation.effects if is_left else equation.effects - {TAP_EFFECT},
        )

    return rewrite_jaxpr(jaxpr, None, change) if is_tapped(jaxpr) else jaxpr


def _batching_rule(
    vmap: Vmap, args: Sequence[Any], dims: Sequence[int | None], **params: Param
) -> tuple[Sequence[Any], Sequence[int | None]]:
    return vectorize_some(
        with_condition_in_body(**params), Batch(vmap.name, vmap.size), args, dims
    )


vectorize_loops(is_tapped, _batching_rule)
