"""Static arguments: a part of the structure of the arguments, without leaves."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shardmap._jax.types import PyTree
from shardmap.api.arguments import Static
from shardmap.units import shown


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
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Arguments whose static ones, by position or name, have no leaves."""
    return (
        tuple(Static(x) if k in keys else x for k, x in enumerate(args)),
        {k: Static(x) if k in keys else x for k, x in kwargs.items()},
    )


def without_static(x: PyTree) -> PyTree:
    """The value of a static argument; any other argument as it is."""
    return x.value if isinstance(x, Static) else x


def in_order(
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    statics: Collection[int | str] = (),
) -> tuple[PyTree, ...]:
    """Positional and keyword arguments, in the order of the graph's inputs."""
    positional, named = with_statics(args, kwargs, statics)
    return (*positional, named) if named else positional
