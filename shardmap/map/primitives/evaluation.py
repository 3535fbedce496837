"""Evaluating a jaxpr equation by equation, some of them otherwise than JAX does."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import jax.extend.core.primitives as p

from shardmap._jax.types import AnyJaxpr, Atom, Equation
from shardmap._jax.walk import constants_of, opened

CALLS = {
    p.closed_call_p: "call_jaxpr",
    p.custom_jvp_call_p: "call_jaxpr",
    p.custom_vjp_call_p: "call_jaxpr",
    p.jit_p: "jaxpr",
    p.remat_p: "jaxpr",
}
"""Primitives that only call what they hold, and under which name they hold it."""

Rule = Callable[[Any, list[Any]], Sequence[Any] | None]
"""Takes an equation and its operands; gives the results, or None: as JAX does."""


def evaluate(jaxpr: AnyJaxpr, args: Sequence[Any], rule: Rule) -> list[Any]:
    """Evaluates ``jaxpr``, open or closed, with what its equations call in line.

    Nothing can be differentiated after that by rules of its own: it is for programs
    that are about to run.
    """
    consts = constants_of(jaxpr)
    jaxpr = opened(jaxpr)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        results = rule(equation, operands)
        if results is None:
            results = _default(equation, operands, rule)
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _default(equation: Equation, operands: list[Any], rule: Rule) -> Sequence[Any]:
    primitive = equation.primitive
    with equation.ctx.manager:
        if primitive in CALLS:
            return evaluate(equation.params[CALLS[primitive]], operands, rule)
        params = primitive.get_bind_params(equation.params)
        results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]
