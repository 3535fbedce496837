"""Marks on values in jaxprs, which JAX's transformations keep.

A mark is a jitted identity, which is told by its name.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import jit_p

from shardmap._jax.types import Equation, Value, Var
from shardmap._jax.walk import equations_for

Mark = Callable[[Value], Value]


def value_of_reference(x: Value) -> Value:
    """What was read from a reference."""
    return x


def shared_result(x: Value) -> Value:
    """A result that all elements share, though its tangent does not show it."""
    return x


def is_mark(equation: Equation, mark: Mark) -> bool:
    is_jit = equation.primitive is jit_p
    return is_jit and bool(equation.params["name"] == mark.__name__)


def with_marks(equation: Equation, results: Collection[Var], mark: Mark) -> list[Any]:
    """The equation, with a mark on these of its results."""
    new = {var: jex_core.Var(var.aval) for var in results}
    outvars = [new.get(var, var) for var in equation.outvars]
    marks: list[Any] = []
    for var, before in new.items():
        marks += equations_for(jax.jit(mark), [before], [var], equation)
    return [equation.replace(outvars=outvars), *marks]
