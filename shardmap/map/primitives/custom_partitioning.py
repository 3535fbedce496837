"""Functions with a partitioning of their own, for vectorised maps."""

from typing import Any

import jax

from shardmap._jax.primitives import CUSTOM_PARTITIONING
from shardmap._jax.types import Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.map.primitives.rewriting import rewrite_jaxpr


def without_custom_partitioning(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` that calls functions themselves that have a partitioning of their own.

    That is for the function as it was written, of one element, and JAX cannot vectorise
    it. Where every device runs its own program, JAX leaves it out, too.
    """
    found = False

    def change(equation: Equation, shadowed: bool) -> Any:
        nonlocal found
        if equation.primitive is not CUSTOM_PARTITIONING:
            return equation
        found = True
        [held] = jaxprs_in(equation.params)
        avals = map(aval_of, equation.invars)
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        as_it_is = jax.jit(lambda *args: jax.core.eval_jaxpr(held, (), *args))
        [call] = jax.make_jaxpr(as_it_is)(*structs).eqns
        return equation.replace(primitive=call.primitive, params=call.params)

    changed = rewrite_jaxpr(jaxpr, None, change)
    return changed if found else jaxpr
