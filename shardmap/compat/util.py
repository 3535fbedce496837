"""Functions of ``jax.util`` that programs used."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "partial",
    "prod",
    "safe_map",
    "safe_zip",
    "split_list",
    "unzip2",
    "unzip3",
    "wraps",
]

partial = functools.partial
prod = math.prod
wraps = functools.wraps


def safe_map(f: Callable[..., Any], *lists: Iterable[Any]) -> list[Any]:
    """`map` of lists of equal length, as a list.

    >>> safe_map(max, [1, 5], [4, 2])
    [4, 5]
    """
    return [f(*each) for each in zip(*lists, strict=True)]


def safe_zip(*lists: Iterable[Any]) -> list[Any]:
    """`zip` of lists of equal length, as a list.

    >>> safe_zip([1, 2], "ab")
    [(1, 'a'), (2, 'b')]
    """
    return list(zip(*lists, strict=True))


def unzip2(pairs: Iterable[tuple[Any, Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits pairs into a tuple of the first and a tuple of the second items.

    >>> unzip2([(1, "a"), (2, "b")])
    ((1, 2), ('a', 'b'))
    """
    pairs = list(pairs)
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def unzip3(triples: Iterable[tuple[Any, Any, Any]]) -> tuple[tuple[Any, ...], ...]:
    """As `unzip2`, for triples.

    >>> unzip3([(1, 2, 3)])
    ((1,), (2,), (3,))
    """
    triples = list(triples)
    return tuple(tuple(triple[k] for triple in triples) for k in range(3))


def split_list(args: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Splits a list into parts of these sizes and the rest.

    >>> split_list([1, 2, 3, 4], [1, 2])
    [[1], [2, 3], [4]]
    """
    parts, rest = [], list(args)
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return [*parts, rest]
