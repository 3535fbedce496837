"""The `jax.jit`s that a function takes to be compiled outside of its turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardmap._jax.context import configuration
from shardmap._jax.types import Value

MOST_KINDS = 16
"""For how many kinds of arguments a function has a `jax.jit` of its own."""

MOST_TIMES = 4
"""How often one of them may get another: JAX may have forgotten what it compiled."""


class Jits:
    """The `jax.jit`s of one function, one for each kind of arguments and configuration.

    JAX has no fast way any more for arguments at which a function has raised, as ours
    does where it may not be compiled. So what is compiled then is another's.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.first = make()
        self._by_kind: dict[Any, Any] = {}
        self._times: dict[Any, int] = {}

    def of(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Any | None:
        """The one that these arguments had, or may have had; None if none had any."""
        if len(self._by_kind) == 1:
            return next(iter(self._by_kind.values()))
        return self._by_kind.get(_kind(args, kwargs)) if self._by_kind else None

    def new(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Any:
        """The one in which these arguments are to be compiled."""
        kind = _kind(args, kwargs)
        times = self._times.get(kind, 0)
        if not self._by_kind:
            made = self.first
        elif times == MOST_TIMES or (not times and len(self._by_kind) == MOST_KINDS):
            return self._by_kind.get(kind, self.first)
        else:
            made = self._make()
        self._times[kind] = times + 1
        self._by_kind[kind] = made
        return made


def _kind(args: Sequence[Value], kwargs: Mapping[str, Value]) -> Any:
    """Equal where one program is compiled, as far as arguments and JAX tell."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    kind = (
        tree,
        configuration(),
        tuple(
            (
                _type(leaf),
                getattr(leaf, "sharding", None),
                getattr(leaf, "committed", None),
            )
            for leaf in leaves
        ),
    )
    try:
        hash(kind)
    except TypeError:
        return None  # JAX says what is wrong with them.
    return kind


def _type(leaf: Value) -> Any:
    try:
        return jax.typeof(leaf)
    except TypeError:
        return type(leaf)
