"""What stands in a `ShardingSpec`: how a dimension is cut, and what a mesh axis walks.

All are immutable, compare and hash by type and value, pickle, and print as the code
that builds them. Names and fields are those of JAX 0.4.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardmap._jax.types import Value


def integer(value: Value, what: str) -> int:
    """Returns `value` as an int; TypeError if it is a bool, a float or no number."""
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(
        f"{what} must be an integer, got {value!r} of type {type(value).__name__}"
    )


def positive(value: Value, what: str) -> int:
    """As `integer`; ValueError if it is below 1."""
    number = integer(value, what)
    if number < 1:
        raise ValueError(f"{what} must be at least 1, got {number}")
    return number


@dataclass(frozen=True, repr=False, init=False, slots=True)
class Chunked:
    """The dimension is cut into `prod(chunks)` equal shards and stays a dimension.

    Several numbers mean that several mesh dimensions cut this one array dimension,
    major to minor. As `Chunked` in JAX 0.4.

    Attributes:
      chunks: the numbers of chunks, stored as a tuple. One number may be given bare.

    Raises:
      TypeError: a number of chunks is no integer.
      ValueError: there is none, or one is below 1.

    >>> Chunked(2) == Chunked([2])
    True
    >>> Chunked((2, 4))
    Chunked((2, 4))
    """

    chunks: tuple[int, ...]

    def __init__(self, chunks: int | Iterable[int]) -> None:
        numbers = tuple(chunks) if isinstance(chunks, Iterable) else (chunks,)
        if not numbers:
            raise ValueError(
                "Chunked needs at least one number of chunks, got an empty sequence: "
                "write None for a dimension that is not cut"
            )
        stored = tuple(positive(n, "a number of chunks in Chunked") for n in numbers)
        object.__setattr__(self, "chunks", stored)

    def __repr__(self) -> str:
        return f"Chunked({self.chunks!r})"


@dataclass(frozen=True, repr=False, init=False, slots=True)
class Unstacked:
    """The dimension is cut into shards of length 1 and does not exist inside the map.

    What `jax.pmap` does to a mapped axis. As `Unstacked` in JAX 0.4.

    Attributes:
      size: the size of the dimension.

    Raises:
      TypeError: `size` is no integer.
      ValueError: `size` is below 1.

    >>> from shardmap.sharding.spec import ShardingSpec
    >>> ShardingSpec((Unstacked(2),), (ShardedAxis(0),)).indices((2,)).tolist()
    [(0,), (1,)]
    """

    size: int

    def __init__(self, size: int) -> None:
        object.__setattr__(self, "size", positive(size, "the size in Unstacked"))

    def __repr__(self) -> str:
        return f"Unstacked({self.size!r})"


@dataclass(frozen=True, slots=True)
class NoSharding:
    """The dimension is not cut: another way to write None, as JAX 0.4 wrote it.

    >>> from shardmap.sharding.spec import ShardingSpec
    >>> ShardingSpec((NoSharding(),), ())
    ShardingSpec((None,), ())
    """


@dataclass(frozen=True, repr=False, init=False, slots=True)
class ShardedAxis:
    """This mesh dimension walks the shards of one sharded axis.

    As `ShardedAxis` in JAX 0.4.

    Attributes:
      axis: the number of the sharded axis, from 0. Dimensions that are not cut are not
        counted, and each number in a `Chunked` counts as one.

    Raises:
      TypeError: `axis` is no integer.
      ValueError: `axis` is negative.

    >>> from shardmap.sharding.spec import ShardingSpec
    >>> ShardingSpec((None, Chunked(4)), (ShardedAxis(0),)).mesh_shape
    (4,)
    """

    axis: int

    def __init__(self, axis: int) -> None:
        number = integer(axis, "the axis in ShardedAxis")
        if number < 0:
            raise ValueError(
                f"the axis in ShardedAxis must be at least 0, got {number}: sharded "
                "axes are counted from the first"
            )
        object.__setattr__(self, "axis", number)

    def __repr__(self) -> str:
        return f"ShardedAxis({self.axis!r})"


@dataclass(frozen=True, repr=False, init=False, slots=True)
class Replicated:
    """The devices along this mesh dimension hold copies.

    As `Replicated` in JAX 0.4.

    Attributes:
      replicas: the number of copies, which is the size of the mesh dimension.

    Raises:
      TypeError: `replicas` is no integer.
      ValueError: `replicas` is below 1.

    >>> from shardmap.sharding.spec import ShardingSpec
    >>> ShardingSpec((), (Replicated(3),)).num_shards
    3
    """

    replicas: int

    def __init__(self, replicas: int) -> None:
        number = positive(replicas, "the number of replicas in Replicated")
        object.__setattr__(self, "replicas", number)

    def __repr__(self) -> str:
        return f"Replicated({self.replicas!r})"


AvalDimSharding: TypeAlias = Chunked | Unstacked | NoSharding | None
MeshDimAssignment: TypeAlias = ShardedAxis | Replicated
