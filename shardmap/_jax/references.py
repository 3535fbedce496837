"""Functions with references as pure functions."""

from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src.state.discharge import discharge_state

from shardmap._jax.types import Jaxpr
from shardmap._jax.walk import equations, without_constants


def discharged(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` without the references that it makes: what they hold is a value.

    JAX has this for the jaxprs of Pallas only; it is what lowering does to all others.
    The axes of collectives have to be bound.
    """
    avals = (var.aval for e in equations(jaxpr) for var in e.outvars)
    if not any(isinstance(aval, jax.ref.AbstractRef) for aval in avals):
        return jaxpr
    closed: Any = discharge_state(jex_core.ClosedJaxpr(jaxpr, ()))
    return without_constants(closed) if closed.consts else closed.jaxpr
