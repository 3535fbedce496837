"""Functions with a partitioning of their own, for vectorised maps."""

from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning

from shardmap.map.primitives.rewriting import rewrite_jaxpr


def _primitive() -> Any:
    """The primitive, by using it."""
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(identity)(np.zeros(1, np.float32)).jaxpr.eqns[0].primitive


CUSTOM_PARTITIONING = _primitive()


def without_custom_partitioning(jaxpr: Any) -> Any:
    """``jaxpr`` that calls functions themselves that have a partitioning of their own.

    That is for the function as it was written, of one element, and JAX cannot vectorise
    it. Where every device runs its own program, JAX leaves it out, too.
    """
    found = False

    def change(equation: Any, shadowed: bool) -> Any:
        nonlocal found
        if equation.primitive is not CUSTOM_PARTITIONING:
            return equation
        found = True
        [held] = jex_core.jaxprs_in_params(equation.params)
        [call] = jax.make_jaxpr(
            jax.jit(lambda *args: jax.core.eval_jaxpr(held, (), *args))
        )(
            *(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in equation.invars)
        ).eqns
        return equation.replace(primitive=call.primitive, params=call.params)

    changed = rewrite_jaxpr(jaxpr, None, change)
    return changed if found else jaxpr
