"""The rules of JAX's type checker for our primitives.

With ``jax_enable_checks``, JAX checks the jaxprs that it makes, and the jaxprs in their
equations, without the axes that these bind. A primitive that binds axes needs a rule of
its own, in the private table `jax._src.core.custom_typechecks`.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardmap._jax import other_jax
from shardmap._jax.arrays import types_unchecked
from shardmap._jax.types import Param, Primitive, Value

try:
    from jax._src.core import (
        JaxprTypeError,
        check_jaxpr,
        custom_typechecks,
        extend_axis_env_nd,
    )
except ImportError as error:
    raise other_jax(
        f"shardmap tells JAX's type checker about its primitives, but {error}"
    ) from error

__all__ = ["bound_axis", "check_jaxpr", "register_typecheck"]

Typed = tuple[Sequence[Any], Any]
"""The avals of an equation's results, and its effects."""


def register_typecheck(primitive: Primitive, check: Callable[..., Typed]) -> None:
    """Registers the rule that checks equations of ``primitive``.

    Args:
      primitive: any primitive.
      check: takes the operands, variables and literals with an ``aval`` each, and the
        parameters by name. Returns the results' avals and the effects, or raises a
        TypeError or ValueError, to which JAX adds the equation.
    """

    def typecheck(_: object, *operands: Value, **params: Param) -> Typed:
        try:
            return check(*operands, **params)
        except JaxprTypeError:
            raise
        except (TypeError, ValueError) as error:
            raise JaxprTypeError(str(error)) from error

    custom_typechecks[primitive] = typecheck


def bound_axis(name: Hashable, size: int) -> AbstractContextManager[Any]:
    """`bound_axes` for one axis."""
    return bound_axes({name: size})


@contextlib.contextmanager
def bound_axes(sizes: Mapping[Any, int]) -> Iterator[None]:
    """A context as in the function of a map: with these axes bound, innermost last."""
    with types_unchecked(), extend_axis_env_nd(list(sizes.items())):
        yield
