"""Buffers of results, the tree of partial results, and reads of boxes."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from shardmap._jax.context import config_value
from shardmap._jax.types import Aval
from shardmap.arrays.array_likes import device_dtype, refuse_other_dtype
from shardmap.arrays.combining import COMBINE_IN_NUMPY, identity
from shardmap.plan.engine.keys import data_aval, is_key
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, shape_of, slices

FOLDED = 16
"""How many partial results make one."""


def new_buffer(value: Value, combiner: str) -> np.ndarray:
    aval = data_aval(value.aval)
    if combiner == "insert":
        return np.zeros(aval.shape, aval.dtype)
    return np.full(aval.shape, identity(combiner, aval.dtype), aval.dtype)


def put(buffer: Any, box: Box, combiner: str, part: ArrayLike) -> None:
    """Writes a shard's result into anything with ``__getitem__``, ``__setitem__``."""
    index: Any = slices(box)
    part = np.asarray(part)
    if combiner != "insert":
        # Parts of inf and -inf, and sums that overflow, come out as XLA has them.
        with np.errstate(all="ignore"):
            part = COMBINE_IN_NUMPY[combiner](np.asarray(buffer[index]), part)
    buffer[index] = part


def fold(combiner: str, parts: Iterable[Any], own: bool = False) -> np.ndarray:
    """Combines arrays, from the first to the last.

    Args:
      combiner: how.
      parts: the arrays.
      own: whether the first one may be written to.
    """
    parts = iter(parts)
    total = next(parts)
    with np.errstate(all="ignore"):
        for part in parts:
            out = total if own and total.ndim else None
            total = np.asarray(COMBINE_IN_NUMPY[combiner](total, part, out=out))
            own = True
    return np.asarray(total)


class Fold:
    """A tree of partial results, whose shape depends on their number alone.

    Sixteen of them make one, sixteen of those the next, and so on, so that whoever
    combines them, the bytes are the same. The top of the tree is the buffer.

    Nodes are arrays, or what stands for arrays, such as futures.

    Args:
      combiner: how they are combined.
      count: how many there are.
      combine: makes one node of several, with the arguments of `fold`.
      at_once: how many are combined at once: two as soon as they are there, or all that
        make a node.
    """

    def __init__(
        self,
        combiner: str,
        count: int,
        combine: Callable[[str, list[Any], bool], Any] = fold,
        at_once: int = 2,
    ) -> None:
        self.left = count
        combine = functools.partial(combine, combiner)
        self._levels = [_Level(combine, at_once) for _ in range(depth(count))]

    def add(self, part: Any) -> Any:
        """Takes the next one, and gives what is to be put into the buffer, if any."""
        self.left -= 1
        node = part
        for level in self._levels:
            node = level.add(node, self.left == 0)
            if node is None:
                break
        return node

    def rest(self) -> Any:
        """Combines what is not in the buffer yet, and gives it."""
        node = None
        for level in self._levels:
            node = level.add(node, True)
        return node


def depth(count: int) -> int:
    """How many levels a tree of partial results has below its buffer.

    >>> depth(1), depth(16), depth(17), depth(257)
    (0, 0, 1, 2)
    """
    found = 0
    while count > FOLDED:
        count, found = -(-count // FOLDED), found + 1
    return found


class _Level:
    """The unfinished node on one level of a tree."""

    def __init__(self, combine: Callable[[list[Any], bool], Any], at_once: int) -> None:
        self._combine, self._at_once = combine, at_once
        self._nodes: list[Any] = []
        self._count = 0

    def add(self, part: Any, last: bool) -> Any:
        """Takes one more, and gives the node when it is whole."""
        if part is not None:
            self._nodes.append(part)
            self._count += 1
        whole = last or self._count == FOLDED
        if len(self._nodes) == self._at_once or (whole and len(self._nodes) > 1):
            # The first one is somebody else's, if it was not made here.
            own = self._count > len(self._nodes)
            self._nodes = [self._combine(self._nodes, own)]
        if not whole or not self._nodes:
            return None
        [node] = self._nodes
        self._nodes, self._count = [], 0
        return node


class Folds:
    """The trees of several boxes."""

    def __init__(self) -> None:
        self._known: dict[Any, Fold] = {}

    def add(
        self, key: Any, combiner: str, count: int, part: ArrayLike
    ) -> np.ndarray | None:
        """As `Fold.add`, of the tree of a key, which is forgotten when it is made."""
        fold = self._known.setdefault(key, Fold(combiner, count))
        made: np.ndarray | None = fold.add(np.asarray(part))
        if not fold.left:
            del self._known[key]
        return made

    def rest(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Per key, what is not in the buffer yet. The caller puts it there."""
        for key, fold in self._known.items():
            node = fold.rest()
            if node is not None:
                yield key, node


def start_dtype(starts: Sequence[int]) -> Any:
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


def refuse_masked(array: Any) -> None:
    """Refuses an array with masked elements, which JAX does not have.

    Raises:
      ValueError: some elements are masked.
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise ValueError(
            f"{int(np.ma.count_masked(array)):,} of {array.size:,} elements are "
            "masked, and JAX has no masks: give array.filled(value), and "
            "numpy.ma.getmaskarray(array) as an argument of its own if it is needed"
        )


def read_box(array: Any, box: Box, aval: Aval) -> Any:
    """A box of an array-like, as NumPy or JAX array of the aval's dtype.

    Raises:
      ValueError: what came has another shape or dtype, or is masked.
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
