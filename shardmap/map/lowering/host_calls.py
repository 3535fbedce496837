"""Calls of the host in the function of a map: taps, and JAX's callbacks."""

from typing import Any

from shardmap._jax.effects import happens_outside
from shardmap._jax.primitives import PURE_CALLBACK
from shardmap._jax.types import Equation, Jaxpr
from shardmap._jax.walk import equations, jaxprs_in, rewrite_jaxpr
from shardmap.map.primitives.tap import tap_p


def has_effect(equation: Equation) -> bool:
    """Whether anything happens in an equation that is seen outside of it."""
    return any(map(happens_outside, equation.effects))


def happens_here(equation: Equation) -> bool:
    """Whether an equation has an effect, and not only holds others that have."""
    # A tap's jaxpr is there for JAX to look at; it is not run.
    return has_effect(equation) and (
        equation.primitive is tap_p or not jaxprs_in(equation.params)
    )


def one_at_a_time(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` whose pure callbacks can be vectorised, by a call for each element.

    One that is not told how is for one element: so it is where each has its device.
    """

    def change(equation: Equation) -> Any:
        params = equation.params
        if equation.primitive is not PURE_CALLBACK or params["vmap_method"] is not None:
            return equation
        return equation.replace(params=params | {"vmap_method": "sequential"})

    return rewrite_jaxpr(jaxpr, change)


def calls_host(jaxpr: Jaxpr) -> bool:
    """Whether anything in ``jaxpr`` calls the host."""
    return any(map(happens_outside, jaxpr.effects)) or any(
        equation.primitive is PURE_CALLBACK for equation in equations(jaxpr)
    )
