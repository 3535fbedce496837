"""Buffers of results, the tree of partial results, and reads of boxes."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from shardmap._jax.context import config_value
from shardmap._jax.types import Aval
from shardmap.arrays.array_likes import device_dtype, refuse_other_dtype
from shardmap.arrays.combining import COMBINE_IN_NUMPY
from shardmap.planning.engine.keys import data_aval, is_key
from shardmap.planning.engine.monoids import Combiner, Part, combine, start
from shardmap.planning.engine.nodes import Value
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
        before = [np.asarray(buffer[index]) for buffer, index in pairs]
        # Like XLA, without warnings about inf - inf and sums that overflow.
        with np.errstate(all="ignore"):
            parts = combine(np, combiner, before, parts)
    for (buffer, index), part in zip(pairs, parts, strict=True):
        buffer[index] = part


def fold(
    combiner: Combiner, parts: Iterable[Arrays], may_write: bool = False
) -> list[np.ndarray]:
    """Combines partial results, from the first to the last.

    Args:
      combiner: how.
      parts: the arrays of each.
      may_write: whether those of the first one may be written to.
    """
    parts = iter(parts)
    total = next(parts)
    with np.errstate(all="ignore"):
        for part in parts:
            if isinstance(combiner, Part):
                total = combine(np, combiner, total, part)
            else:
                [x], [y] = total, part
                out = x if may_write and x.ndim else None
                total = [np.asarray(COMBINE_IN_NUMPY[combiner](x, y, out=out))]
            may_write = True
    return list(map(np.asarray, total))


class Fold:
    """A tree of partial results. Its shape depends on their number alone.

    They are combined in a tree, sixteen at a time, so that every executor gives the
    same bytes. The top of the tree is the buffer.

    Nodes are tuples of arrays, or stand for them, as results of tasks do.

    Args:
      combiner: how they are combined.
      count: how many there are.
      combine: makes one node of several, with the arguments of `fold`.
      at_once: how many are combined at once: two as soon as they are there, or all that
        make a node.
    """

    def __init__(
        self,
        combiner: Combiner,
        count: int,
        combine: Callable[[Combiner, list[Any], bool], Any] = fold,
        at_once: int = 2,
    ) -> None:
        self.left = count
        self._combine, self._at_once = functools.partial(combine, combiner), at_once
        # Per level, the unfinished node in parts, and how many are in it.
        self._nodes: list[list[Any]] = [[] for _ in range(depth(count))]
        self._counts = [0] * depth(count)

    def add(self, part: Any) -> Any:
        """Adds a partial result; returns what goes into the buffer, or None."""
        self.left -= 1
        return self._add(part, self.left == 0)

    def rest(self) -> Any:
        """Combines what is not in the buffer yet, and returns it."""
        return self._add(None, True)

    def _add(self, node: Any, last: bool) -> Any:
        for level, nodes in enumerate(self._nodes):
            if node is not None:
                nodes.append(node)
                self._counts[level] += 1
            whole = last or self._counts[level] == ARITY
            if len(nodes) == self._at_once or (whole and len(nodes) > 1):
                # The first node may be written to only if it was made here.
                may_write = self._counts[level] > len(nodes)
                nodes[:] = [self._combine(nodes.copy(), may_write)]
            if not whole:
                return None
            node = nodes.pop() if nodes else None
            self._counts[level] = 0
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
    """The dtype in which a shard gets its starts.

    Raises:
      ValueError: they need 64 bits, which JAX does not use.
    """
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
    """Refuses an array with masked elements, which JAX does not have.

    Raises:
      ValueError: some elements are masked.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        where, masked = f"{name}: " if name else "", int(np.ma.count_masked(array))
        raise ValueError(
            f"{where}{masked:,} of {array.size:,} elements are masked, and JAX has no "
            "masks: give array.filled(value), and numpy.ma.getmaskarray(array) as an "
            "argument of its own if it is needed"
        )


def read_box(array: Any, box: Box, aval: Aval) -> Any:
    """A box of an array-like, as NumPy or JAX array of the aval's dtype.

    Raises:
      ValueError: the box that was read has another shape or dtype, or is masked.
    """
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
