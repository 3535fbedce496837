"""Functions with a partitioning of their own, for vectorised maps."""

from typing import Any

import jax

from shardmap._jax.primitives import CUSTOM_PARTITIONING
from shardmap._jax.types import Equation, Jaxpr
from shardmap._jax.walk import equations_for, jaxprs_in, rewrite_jaxpr


def without_custom_partitioning(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` that calls functions themselves that have a partitioning of their own.

    That is for the function as it was written, of one element, and JAX cannot vectorise
    it. Where every device runs its own program, JAX leaves it out, too.
    """

    def change(equation: Equation) -> Any:
        if equation.primitive is not CUSTOM_PARTITIONING:
            return equation
        [held] = jaxprs_in(equation.params)
        as_it_is = jax.jit(lambda *args: jax.core.eval_jaxpr(held, (), *args))
        return equations_for(as_it_is, equation.invars, equation.outvars, equation)

    return rewrite_jaxpr(jaxpr, change)
