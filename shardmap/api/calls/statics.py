"""Arguments that are compile-time constants."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from shardmap._jax.types import PyTree


class Static:
    """A compile-time constant as a part of keys.

    Equal if the values are equal and of one type, also inside tuples and frozensets:
    ``1``, ``1.0`` and ``True`` are equal, but compute differently.

    >>> Static((1, 2)) == Static((1, 2)), Static((1, 2)) == Static((True, 2))
    (True, False)
    """

    __slots__ = ("__weakref__", "_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.value)
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        mine, its = self.value, other.value
        return mine is its or typed(mine) == typed(its)

    def __repr__(self) -> str:
        return repr(self.value)


def typed(value: Hashable) -> Hashable:
    """A value with its types, equal only for equal values of equal types.

    >>> typed(1) == typed(1.0)
    False
    """
    if isinstance(value, tuple):
        return type(value), *map(typed, value)
    if isinstance(value, frozenset):
        return type(value), frozenset(map(typed, value))
    return type(value), value


def wrap_statics(args: tuple[Any, ...], argnums: Collection[int]) -> tuple[Any, ...]:
    """Wraps the static arguments."""
    if not argnums:
        return args
    count = len(args)
    static = {argnum % count for argnum in argnums if -count <= argnum < count}
    return tuple(Static(a) if k in static else a for k, a in enumerate(args))


def apply_statics(
    fun: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> PyTree:
    """Calls a user's function with the values of its static arguments."""
    values = (arg.value if isinstance(arg, Static) else arg for arg in args)
    return fun(*values, **kwargs)
