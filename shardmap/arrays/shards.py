"""Taking arrays apart: the elements of an axis, each from the device that holds it.

``y[i]`` on an array that is on several devices is a program over all of them, and so
is its result. The functions here read the one device that holds element ``i``.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

import jax
import numpy as np

from shardmap._jax.types import PyTree
from shardmap.arrays.programs.shard_programs import (
    Index,
    RefusedError,
    Span,
    cuts_for,
    placed,
)
from shardmap.units import shown

T = TypeVar("T")


def shard_of(x: T, i: int | slice | tuple[int | slice, ...], *, axis: int = 0) -> T:
    """Returns element ``i`` of an array along an axis, on the device that holds it.

    The value is ``x[i]``, without communication. For a pytree, each leaf is indexed. (A
    `Shard` is something else: one part of the work of a `plan`.)

    ``i`` may index several axes, beginning with ``axis``: ``shard_of(x, (1, 2))`` is
    ``x[1, 2]``, an element of a map in a map, and ``shard_of(x, slice(2, 4))`` is
    ``x[2:4]``. If several devices hold copies, the first is read.

    A result on one device is not committed to it: it can be combined with arrays on any
    device, and `jax.jit` of it alone runs on the default device. To compute on the
    device of the result, commit it with ``jax.device_put(part, part.device)``. A result
    that is sharded itself, such as ``x[1]`` of a map in a map, is committed.

    Args:
      x: an array, or a pytree of arrays. NumPy arrays and tracers are indexed as
        ``x[i]``.
      i: an int, negative from the end; a slice without a step; or a tuple of these. A
        slice is within the shard of one device, or consists of whole shards.
      axis: the axis to index, negative from the end; the first one if ``i`` is a tuple.

    Raises:
      TypeError: ``i`` is not an index of this kind.
      ValueError: a slice has a step or needs parts of several shards; the device
        belongs to another process; or there is no such axis.
      IndexError: ``i`` is out of range.

    Example:
      >>> import numpy as np
      >>> y = jax.device_put(np.arange(6).reshape(2, 3), jax.devices()[0])
      >>> shard_of(y, 1)
      Array([3, 4, 5], dtype=int32)
      >>> shard_of(y, (1, slice(0, 2)))
      Array([3, 4], dtype=int32)
    """
    index = i if type(i) is int else _hashable(i)
    leaves, tree = jax.tree.flatten(x)
    taken = _take("shard_of", x, leaves, axis, index)
    return jax.tree.unflatten(tree, [parts[0] for parts in taken])


@overload
def unstack(x: T, *, axis: int = 0) -> list[T]: ...


@overload
def unstack(x: T, *, axis: tuple[int, ...]) -> list[Any]: ...


def unstack(x: Any, *, axis: int | tuple[int, ...] = 0) -> list[Any]:
    """Returns all elements along an axis, each on the device that holds it.

    The result is ``[shard_of(x, 0), shard_of(x, 1), ...]``, with one program for each
    device.

    Args:
      x: as for `shard_of`. All leaves have the same length along ``axis``.
      axis: the axis, negative from the end. Several axes give lists of lists:
        ``unstack(x, axis=(0, 1))[1][2]`` is ``x[1, 2]``.

    Returns:
      A list of arrays, or of pytrees like ``x``.

    Raises:
      ValueError: as for `shard_of`; or leaves differ in length, or there are none.

    Example:
      >>> import numpy as np
      >>> unstack({"a": np.arange(2), "b": np.zeros((2, 3))})[1]["a"]
      np.int64(1)
    """
    leaves, tree = jax.tree.flatten(x)
    taken = _take("unstack", x, leaves, axis, None)
    axes = axis if isinstance(axis, tuple) else (axis,)
    sizes = [tuple(np.shape(leaf)[one] for one in axes) for leaf in leaves]
    if len(set(sizes)) != 1:
        listed = "".join(
            f"\n  * {_name(x, k)} has {' x '.join(map(str, size))}"
            for k, size in enumerate(sizes)
        )
        raise ValueError(
            "unstack needs arrays with equally many elements along axis "
            f"{axis}:{listed or ' there are no arrays'}"
        )
    elements = (jax.tree.unflatten(tree, parts) for parts in zip(*taken, strict=True))
    return _nested(elements, sizes[0])


def unreplicate(tree: T, *, axis: int = 0) -> T:
    """Returns element 0 of each array of a pytree, for arrays whose elements are equal.

    This is ``shard_of(tree, 0)``, like `flax.jax_utils.unreplicate`. For arrays over
    several processes it is the first element on this process.

    Args:
      tree: as for `shard_of`.
      axis: the mapped axis, which is removed.

    Raises:
      ValueError: as for `shard_of`.
      IndexError: the axis has no elements.

    Example:
      >>> import numpy as np
      >>> unreplicate({"w": np.ones((8, 2))})
      {'w': array([1., 1.])}
    """
    leaves, structure = jax.tree.flatten(tree)
    taken = _take("unreplicate", tree, leaves, axis, "first")
    return jax.tree.unflatten(structure, [parts[0] for parts in taken])


def _take(
    caller: str,
    tree: PyTree,
    leaves: Sequence[Any],
    axis: int | tuple[int, ...],
    index: Index,
) -> list[list[Any]]:
    """For each leaf, the part at ``index`` in a list, or all its elements."""
    try:
        cuts = cuts_for(tuple(map(placed, leaves)), axis, index)
    except RefusedError as refused:
        name = _name(tree, refused.leaf)
        raise refused.kind(f"{caller}: {name} {refused}") from None
    if len(cuts.steps) == len(leaves) == 1:  # The fast path of one shard.
        (step,) = cuts.steps
        shard = leaves[0].addressable_data(step.shards[0][1])
        return [step.run(shard, *step.offsets)]
    taken: list[list[Any]] = [[None] * length for length in cuts.lengths]
    for step in cuts.steps:
        shards = [leaves[leaf].addressable_data(n) for leaf, n in step.shards]
        results = step.run(*shards, *step.offsets)
        for (leaf, position), part in zip(step.targets, results, strict=True):
            taken[leaf][position] = part
    for leaf, shape, shardings in cuts.joins:
        parts = iter(taken[leaf])
        taken[leaf] = [
            jax.make_array_from_single_device_arrays(
                shape, sharding, list(itertools.islice(parts, sharding.num_devices))
            )
            for sharding in shardings
        ]
    for leaf, indices in cuts.indexed:
        taken[leaf] = [leaves[leaf][one] for one in indices]
    return taken


def _hashable(i: SupportsIndex | slice | tuple[SupportsIndex | slice, ...]) -> Index:
    """An index that `cuts_for` takes."""
    if isinstance(i, tuple):
        return tuple(_item(one) for one in i)
    return (_item(i),) if isinstance(i, slice) else _integer(i)


def _integer(i: SupportsIndex) -> int:
    try:
        return operator.index(i)
    except TypeError:
        raise TypeError(
            "shard_of takes an int, a slice or a tuple of these as i, but got "
            f"{shown(i)} of type {type(i).__name__}."
        ) from None


def _item(one: SupportsIndex | slice) -> int | Span:
    if not isinstance(one, slice):
        return _integer(one)
    if one.step not in (None, 1):
        raise ValueError(f"shard_of takes slices without a step, got {one}.")
    edges = (one.start, one.stop)
    return Span(*(None if edge is None else _integer(edge) for edge in edges))


def _nested(elements: Iterator[Any], sizes: Sequence[int]) -> Any:
    """Lists of these sizes in each other, filled row-major."""
    if len(sizes) == 1:
        return list(elements)
    return [
        _nested(itertools.islice(elements, math.prod(sizes[1:])), sizes[1:])
        for _ in range(sizes[0])
    ]


def _name(tree: PyTree, leaf: int) -> str:
    path, _ = jax.tree_util.tree_leaves_with_path(tree)[leaf]
    return f"x{jax.tree_util.keystr(path)}"
