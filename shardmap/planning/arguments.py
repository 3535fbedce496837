"""The arguments of a call: positional and by name. Static ones have no leaves."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from shardmap._jax.stages import trace_as
from shardmap._jax.types import PyTree
from shardmap.api.arguments import Static
from shardmap.units import shown

Arguments: TypeAlias = tuple[tuple[PyTree, ...], Mapping[str, PyTree]]
"""Positional arguments and those by name, of which static ones have no leaves."""


def static_keys(
    fun: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    argnums: int | Sequence[int],
    argnames: str | Sequence[str],
) -> set[int | str]:
    """The static arguments, by position or name as they were given."""
    numbers = [argnums] if isinstance(argnums, int) else argnums
    names = [argnames] if isinstance(argnames, str) else argnames
    parameters = list(inspect.signature(fun).parameters) if names else []
    given: dict[int | str, Any] = {}
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"static_argnums names the positional argument {number}, but there are "
                f"{len(args)}"
            )
        given[number % len(args)] = args[number]
    for name in names:
        if name in kwargs:
            given[name] = kwargs[name]
        elif name not in parameters:
            raise ValueError(
                f"static_argnames names {shown(name)}, no argument of {fun}"
            )
        elif (place := parameters.index(name)) < len(args):
            given[place] = args[place]
    for key, value in given.items():
        try:
            hash(value)
        except TypeError:
            where = f"args[{key}]" if isinstance(key, int) else f"kwargs[{key!r}]"
            raise TypeError(
                f"static arguments must be hashable, got {shown(value)} of type "
                f"{type(value).__name__} in {where}"
            ) from None
    return set(given)


def with_statics(
    args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], keys: Collection[int | str]
) -> Arguments:
    """Arguments, whose static ones are those with these positions or names."""
    return (
        tuple(Static(x) if k in keys else x for k, x in enumerate(args)),
        {k: Static(x) if k in keys else x for k, x in kwargs.items()},
    )


def of_arguments(
    who: str, fun: Callable[..., PyTree], arguments: Arguments
) -> Callable[..., PyTree]:
    """``fun`` as a function of such ``arguments``; in errors, ``who`` traces it."""

    def call(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> PyTree:
        named = {name: _value(x) for name, x in kwargs.items()}
        return fun(*map(_value, args), **named)

    trace_as(call, who, fun, *arguments)
    return call


def _value(x: PyTree) -> PyTree:
    return x.value if isinstance(x, Static) else x
