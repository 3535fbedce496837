"""How JAX's type checker checks equations of our primitives.

With ``jax_enable_checks`` JAX checks the jaxprs that it makes. It looks into whatever
jaxprs an equation holds, without the axes that the equation binds, and asks the
primitive's abstract evaluation for the rest. A primitive that binds axes, or whose
equations stand for others, has to say itself how they are checked. JAX's own have a
table for that, `jax._src.core.custom_typechecks`, which no public name leads to.
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
        check_eqn,
        check_jaxpr,
        custom_typechecks,
        extend_axis_env_nd,
    )
except ImportError as error:
    raise other_jax(
        f"shardmap tells JAX's type checker about its primitives, but {error}"
    ) from error

__all__ = ["bound_axis", "check_jaxpr", "register_typecheck", "type_equation"]

Typed = tuple[Sequence[Any], Any]
"""The avals of an equation's results, and its effects."""


def register_typecheck(primitive: Primitive, check: Callable[..., Typed]) -> None:
    """Has JAX check equations of ``primitive`` by ``check``.

    Args:
      primitive: any primitive.
      check: takes the operands, variables and literals with an ``aval`` each, and the
        parameters by name; gives the results' avals and the effects. A TypeError or
        ValueError of it says what is wrong, to which JAX adds the equation.
    """

    def typecheck(_: object, *operands: Value, **params: Param) -> Typed:
        try:
            return check(*operands, **params)
        except JaxprTypeError:
            raise
        except (TypeError, ValueError) as error:
            raise JaxprTypeError(str(error)) from error

    custom_typechecks[primitive] = typecheck


def type_equation(
    primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Typed:
    """Checks what would be an equation.

    Returns:
      The avals of its results, and its effects.
    """
    if primitive in custom_typechecks:
        return custom_typechecks[primitive](None, *operands, **params)
    return check_eqn(primitive, [operand.aval for operand in operands], params)


def bound_axis(name: Hashable, size: int) -> AbstractContextManager[Any]:
    """`bound_axes` for one axis."""
    return bound_axes({name: size})


@contextlib.contextmanager
def bound_axes(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Where this is entered it is as in a map's function.

    These axes are bound, the last one innermost, and values do not say along which axes
    of a `jax.shard_map` around they differ.
    """
    with types_unchecked(), extend_axis_env_nd(list(sizes.items())):
        yield
