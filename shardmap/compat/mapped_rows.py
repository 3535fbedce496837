"""Rows of mapped results, each from its device, as ``y[i]`` was up to JAX 0.7."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardmap.arrays.shards import shard_of


def row_of(x: jax.Array, index: object) -> Any:
    """``x[index]`` by `shard_of`, if each device has one row of the indexed axes.

    Args:
      x: an array.
      index: anything that can index an array.

    Returns:
      None if ``index`` is not made of ints, and full slices before and after them; or
      if devices have several rows, or parts of one.
    """
    if type(x.sharding) is not NamedSharding:
        return None
    parsed = (0, (index,)) if type(index) is int else _consecutive_ints(index)
    if parsed is None:
        return None
    axis, ints = parsed
    if not _is_cut_into_rows(x.sharding, x.shape, axis, len(ints)):
        return None
    sizes = x.shape[axis : axis + len(ints)]
    if not all(-n <= k < n for n, k in zip(sizes, ints, strict=True)):
        return None
    return shard_of(x, ints, axis=axis)


def _consecutive_ints(index: object) -> tuple[int, tuple[int, ...]] | None:
    """The first axis that is indexed by an int, and the ints.

    >>> _consecutive_ints((slice(None), np.int64(2), 3, slice(None)))
    (1, (2, 3))
    >>> _consecutive_ints((2, slice(None), 3)), _consecutive_ints(slice(2))
    (None, None)
    """
    entries = index if isinstance(index, tuple) else (index,)
    kinds = ""
    for entry in entries:
        if isinstance(entry, int | np.integer) and not isinstance(entry, bool):
            kinds += "i"
        elif isinstance(entry, slice) and entry == slice(None):
            kinds += ":"
        else:
            return None
    ints = tuple(int(k) for k in entries if not isinstance(k, slice))
    if "i" * len(ints) not in kinds or not ints:
        return None
    return kinds.index("i"), ints


@functools.lru_cache(maxsize=4096)
def _is_cut_into_rows(
    sharding: NamedSharding, shape: tuple[int, ...], axis: int, count: int
) -> bool:
    """Whether each device has one row of ``count`` axes from ``axis`` on, whole."""
    indexed, spec = range(axis, axis + count), (*sharding.spec, *[None] * len(shape))
    if len(shape) < indexed.stop or not sharding.is_fully_addressable:
        return False
    held = sharding.shard_shape(shape)
    return any(spec[d] is not None and held[d] == 1 for d in indexed) and all(
        held[d] == shape[d] or (held[d] == 1 and d in indexed)
        for d in range(len(shape))
    )
