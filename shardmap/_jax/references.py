"""Functions with references as pure functions."""

from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src.state.discharge import discharge_state
from jax.extend.core.primitives import jit_p

from shardmap._jax.types import Equation, Jaxpr, Value
from shardmap._jax.walk import (
    equations,
    equations_for,
    jaxprs_in,
    rewrite_jaxpr,
    without_constants,
)


def value_of_reference(x: Value) -> Value:
    return x


def is_read(equation: Equation) -> bool:
    """Whether an equation is what `discharged` makes of the value of a reference."""
    name = value_of_reference.__name__
    return equation.primitive is jit_p and equation.params["name"] == name


def _has_reference(atoms: Any) -> bool:
    return any(isinstance(atom.aval, jax.ref.AbstractRef) for atom in atoms)


def discharged(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` without the references that it makes: what they hold is a value.

    JAX has this for the jaxprs of Pallas only; it is what lowering does to all others.
    The axes of collectives have to be bound. What is read is marked, see `is_read`.
    """
    if not any(_has_reference(e.outvars) for e in equations(jaxpr)):
        return jaxpr

    def change(equation: Equation) -> Any:
        results = [v for v in equation.outvars if not isinstance(v, jex_core.DropVar)]
        is_access = _has_reference(equation.invars) and not jaxprs_in(equation.params)
        if not (is_access and results):
            return equation
        [result] = results
        value = jex_core.Var(result.aval)
        mark = equations_for(jax.jit(value_of_reference), [value], [result], equation)
        return [equation.replace(outvars=[value]), *mark]

    marked = jex_core.ClosedJaxpr(rewrite_jaxpr(jaxpr, change), ())
    closed: Any = discharge_state(marked)
    return without_constants(closed) if closed.consts else closed.jaxpr
