"""How partial results combine: an array by itself, or several arrays together.

Most parts are one array, and combine by a name, such as "add". Some reductions have a
state of several arrays, as the place of a maximum has the maximum beside it. Such a
state is a tuple: all results of one node, which travel, fold and are kept together.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.typing import DTypeLike

from shardmap.arrays.combining import COMBINE, COMBINE_IN_NUMPY, identity
from shardmap.planning.engine.nodes import Value


class Monoid(NamedTuple):
    """An associative way to combine tuples of arrays.

    Attributes:
      name: its name in reports.
      starts: per array, the combiner by name whose identity it begins with.
      combine: gets `numpy` or `jax.numpy` and two tuples, and returns one.
    """

    name: str
    starts: tuple[str, ...]
    combine: Callable[[Any, Sequence[Any], Sequence[Any]], Sequence[Any]]


class Part(NamedTuple):
    """The combiner of one array of a tuple."""

    monoid: Monoid
    number: int

    def __str__(self) -> str:
        return self.monoid.name


Combiner: TypeAlias = str | Part
"""How parts of one array combine; "insert" if each shard has its own elements."""


def start(combiner: Combiner, dtype: DTypeLike) -> np.ndarray:
    """The number that an array is filled with before parts are combined into it."""
    if isinstance(combiner, Part):
        combiner = combiner.monoid.starts[combiner.number]
    return identity(combiner, dtype)


def together(results: Iterable[tuple[Combiner, Value]]) -> list[tuple[int, ...]]:
    """The places of results that combine with each other, in groups."""
    groups: dict[Any, list[int]] = {}
    for place, (combiner, value) in enumerate(results):
        key = value.producer if isinstance(combiner, Part) else place
        groups.setdefault(key, []).append(place)
    return list(map(tuple, groups.values()))


def combine(
    xp: Any, combiner: Combiner, a: Sequence[Any], b: Sequence[Any]
) -> Sequence[Any]:
    """Combines the arrays of one group, in NumPy or in JAX."""
    if isinstance(combiner, Part):
        return combiner.monoid.combine(xp, a, b)
    by_name = (COMBINE_IN_NUMPY if xp is np else COMBINE)[combiner]
    return [by_name(x, y) for x, y in zip(a, b, strict=True)]
