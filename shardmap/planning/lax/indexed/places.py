"""Computes with indices that are known only when a program runs."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from shardmap.planning.engine.rules import Reason

INDEXED = Reason(
    "which elements are taken is known only when it runs",
    "cut the indices, or an axis that is not indexed",
)
WRITTEN = Reason(
    "where the updates go is known only when it runs",
    "cut only the operand, or another axis",
)
ALL_OVER = Reason(
    "the updates of each piece go to places all over it",
    "cut only the operand, or put them in order",
)


def as_int32(index: ArrayLike) -> jax.Array:
    """Indices of any integer type; those far outside of an axis stay outside.

    The start of a shard's box is subtracted from them, which would wrap around in small
    or unsigned types.
    """
    index = jnp.asarray(index)
    limits = np.iinfo(np.int32)
    if index.dtype in (jnp.uint32, jnp.uint64):
        # `jnp.clip` would turn the least int32 into a large unsigned number.
        index = jnp.minimum(index, limits.max)
    elif index.dtype.itemsize > 4:
        index = jnp.clip(index, limits.min, limits.max)
    return index.astype(jnp.int32)


def moved(
    index: jax.Array,
    axes: Sequence[int],
    starts: Mapping[int, ArrayLike],
    last: Sequence[int] | None,
) -> jax.Array:
    """Places relative to the start of a box; those before it are negative.

    They are clipped to the last place on each axis first, if that is given.
    """
    index = as_int32(index)
    columns = []
    for k, axis in enumerate(axes):
        column = index[..., k]
        if last is not None:
            column = jnp.clip(column, 0, last[axis])
        start = starts.get(axis)
        columns.append(column if start is None else column - as_int32(start))
    return jnp.stack(columns, -1)
