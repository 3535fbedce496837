"""Buffers of results, the tree of partial results, and reads of boxes."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from shardmap._jax.context import config_value
from shardmap._jax.types import Aval
from shardmap.arrays.array_likes import device_dtype, refuse_other_dtype
from shardmap.arrays.combining import COMBINE_IN_NUMPY
from shardmap.planning.engine.monoids import Combiner, Part, combine, start
from shardmap.planning.engine.nodes import Value, data_aval, is_key
from shardmap.planning.engine.slices import Box, shape_of, slices

ARITY = 16
"""How many partial results make one."""

Arrays: TypeAlias = Sequence[Any]
"""The arrays of a partial result: one, or those of a tuple."""


def new_buffer(value: Value, combiner: Combiner) -> np.ndarray:
    aval = data_aval(value.aval)
    if combiner == "insert":
        return np.zeros(aval.shape, aval.dtype)
    return np.full(aval.shape, start(combiner, aval.dtype), aval.dtype)


def put(
    buffers: Arrays, boxes: Sequence[Box], combiner: Combiner, parts: Arrays
) -> None:
    """Writes a result into anything with ``__getitem__``, ``__setitem__``."""
    indices: list[Any] = list(map(slices, boxes))
    pairs = list(zip(buffers, indices, strict=True))
    parts = list(map(np.asarray, parts))
    if combiner != "insert":
        parts = combined(combiner, [np.asarray(b[index]) for b, index in pairs], parts)
    for (buffer, index), part in zip(pairs, parts, strict=True):
        buffer[index] = part


def combined(
    combiner: Combiner, total: Arrays, part: Arrays, may_write: bool = False
) -> Arrays:
    """Combines two partial results, in place if the first may be written to."""
    # Like XLA, without warnings about inf - inf and sums that overflow.
    with np.errstate(all="ignore"):
        if may_write and not isinstance(combiner, Part) and np.ndim(total[0]):
            COMBINE_IN_NUMPY[combiner](total[0], part[0], out=total[0])
            return total
        return list(map(np.asarray, combine(np, combiner, total, part)))


class Fold:
    """A tree of partial results, sixteen to a node; the top is the buffer.

    Its shape depends on their number alone, so that every executor gives the same
    bytes.
    """

    def __init__(self, combiner: Combiner, count: int) -> None:
        self.left, self._combiner = count, combiner
        # Per level, the unfinished node, and how many are in it.
        self._nodes: list[Arrays | None] = [None] * depth(count)
        self._counts = [0] * depth(count)

    def add(self, part: Arrays) -> Arrays | None:
        """Adds a partial result; returns what goes into the buffer, or None."""
        self.left -= 1
        return self._add(part, self.left == 0)

    def rest(self) -> Arrays | None:
        """Combines what is not in the buffer yet, and returns it."""
        return self._add(None, True)

    def _add(self, node: Arrays | None, last: bool) -> Arrays | None:
        for level, before in enumerate(self._nodes):
            self._counts[level] += node is not None
            if before is not None and node is not None:
                # The first node may be written to only if it was made here.
                may_write = self._counts[level] > 2
                node = combined(self._combiner, before, node, may_write)
            self._nodes[level] = node = before if node is None else node
            if not last and self._counts[level] < ARITY:
                return None
            self._nodes[level], self._counts[level] = None, 0
        return node


def depth(count: int) -> int:
    """How many levels a tree of partial results has below its buffer.

    >>> depth(1), depth(16), depth(17), depth(257)
    (0, 0, 1, 2)
    """
    levels = 0
    while count > ARITY:
        count, levels = -(-count // ARITY), levels + 1
    return levels


def start_dtype(starts: Sequence[int]) -> Any:
    """The dtype in which a shard gets its starts."""
    if all(abs(start) < 2**31 for start in starts):
        return np.int32
    if not config_value("jax_enable_x64"):
        raise ValueError("a shard starts behind 2**31 elements: enable x64 in JAX")
    return np.int64


def holds(array: Any, dtype: np.dtype) -> bool:
    """Whether JAX reads an array-like, or a number, as this dtype."""
    if isinstance(array, bool | int | float | complex):
        return bool(np.can_cast(type(array), dtype, "same_kind"))
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return bool(array.dtype == dtype)
    return bool(device_dtype(array.dtype) == dtype)


def refuse_masked(array: Any, name: str = "") -> None:
    """Refuses an array with masked elements, which JAX does not have."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        where, masked = f"{name}: " if name else "", int(np.ma.count_masked(array))
        raise ValueError(
            f"{where}{masked:,} of {array.size:,} elements are masked, and JAX has no "
            "masks: give array.filled(value), and numpy.ma.getmaskarray(array) as an "
            "argument of its own if it is needed"
        )


def read_box(array: Any, box: Box, aval: Aval) -> Any:
    """A box of an array-like, as NumPy or JAX array of the aval's dtype."""
    part = array
    if box:
        index: Any = slices(box)
        is_whole = all(b == (0, size) for b, size in zip(box, aval.shape, strict=True))
        part = array if is_whole and hasattr(array, "nbytes") else array[index]
        # Keys may be stored as bits, along an axis of their own.
        shape = np.shape(part)[: len(box)] if is_key(aval) else np.shape(part)
        if shape != shape_of(box):
            raise ValueError(
                f"asked for {index}, which has the shape {shape_of(box)}, its "
                f"__getitem__ gave {np.shape(part)}"
            )
        refuse_masked(part)
    if is_key(aval):
        if not jax.numpy.issubdtype(part.dtype, jax.dtypes.prng_key):
            return part  # Stored as bits already.
        return jax.random.key_data(part)
    if isinstance(part, jax.Array):
        return part
    part = np.asarray(part)
    refuse_other_dtype(array, part)
    return np.asarray(part, aval.dtype)
