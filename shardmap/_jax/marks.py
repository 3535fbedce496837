"""Marks on values in jaxprs, which JAX's transformations keep.

A mark is a jitted identity, which is told by its name.
"""

import functools
from collections.abc import Collection, Hashable
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import jit_p

from shardmap._jax.types import Equation, Value, Var
from shardmap._jax.walk import equations_for

READ = "value of a reference"
"""The mark of what was read from a reference."""


def shared_along(axis_name: Hashable) -> str:
    """The mark of a result that the elements of an axis share."""
    return f"shared along {axis_name!r}"


def is_mark(equation: Equation, mark: str) -> bool:
    return equation.primitive is jit_p and bool(equation.params["name"] == mark)


@functools.lru_cache(maxsize=256)
def _identity(name: str) -> Any:
    def same(x: Value) -> Value:
        return x

    same.__name__ = name
    return jax.jit(same)


def with_marks(equation: Equation, results: Collection[Var], mark: str) -> list[Any]:
    """The equation, with a mark on these of its results."""
    new = {var: jex_core.Var(var.aval) for var in results}
    outvars = [new.get(var, var) for var in equation.outvars]
    marks: list[Any] = []
    for var, before in new.items():
        marks += equations_for(_identity(mark), [before], [var], equation)
    return [equation.replace(outvars=outvars), *marks]
