"""What a function calls, written in line."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core

from shardmap._jax.types import Atom, Equation, Jaxpr
from shardmap._jax.walk import constants_of, opened
from shardmap.map.primitives.evaluation import CALLS


def inline_calls(jaxpr: Jaxpr, is_wanted: Callable[[Any], bool]) -> Any:
    """``jaxpr`` with what some of its equations call in their place.

    Nothing can be differentiated after that by rules of its own: it is for programs
    that are about to run.

    Args:
      jaxpr: a jaxpr.
      is_wanted: which of its equations that only call something are meant.
    """
    values: dict[Any, Any] = {}

    def read(atom: Atom) -> Any:
        return atom if isinstance(atom, jex_core.Literal) else values.get(atom, atom)

    equations: list[Equation] = []
    for equation in jaxpr.eqns:
        equation = equation.replace(invars=list(map(read, equation.invars)))
        called = _called(equation) if is_wanted(equation) else None
        if called is None:
            equations.append(equation)
            continue
        inside = copied(inline_calls(called, is_wanted), equation.invars)
        equations += inside.eqns
        values.update(zip(equation.outvars, inside.outvars, strict=True))
    return jaxpr.replace(eqns=equations, outvars=list(map(read, jaxpr.outvars)))


def _called(equation: Equation) -> Any | None:
    if equation.primitive not in CALLS:
        return None
    called = equation.params[CALLS[equation.primitive]]
    return None if constants_of(called) else opened(called)


def copied(
    jaxpr: Jaxpr, operands: Sequence[Any], results: Sequence[Any] | None = None
) -> Any:
    """``jaxpr`` of these, with variables of its own: it may be called once more.

    Args:
      jaxpr: a jaxpr.
      operands: what it is of.
      results: the variables of what it gives; by default new ones.
    """
    new: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    if results is not None:
        new.update(zip(jaxpr.outvars, results, strict=True))

    def renamed(atom: Atom) -> Any:
        if isinstance(atom, jex_core.Literal):
            return atom
        if atom not in new:
            new[atom] = jex_core.Var(atom.aval)
        return new[atom]

    return jaxpr.replace(
        eqns=[
            equation.replace(
                invars=list(map(renamed, equation.invars)),
                outvars=list(map(renamed, equation.outvars)),
            )
            for equation in jaxpr.eqns
        ],
        outvars=list(map(renamed, jaxpr.outvars)),
    )
