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
    """Element ``i`` of an array along an axis, on the device that holds it.

    A `Shard` is something else: a part of the work of a `plan`.

    It is the value of ``x[i]``, without communication and without other devices. Of a
    pytree, the same of each leaf.

    ``i`` may also say which part along several axes, beginning with ``axis``:
    ``shard_of(x, (1, 2))`` is ``x[1, 2]``, an element of a map in a map, and
    ``shard_of(x, slice(2, 4))`` is ``x[2:4]``. What several devices hold copies of
    comes from the first of them.

    A part that is on one device is an array on it that is not committed: it may meet
    arrays on any device, and `jax.jit` then runs where those are, or on the default
    device. ``jax.device_put(part, part.device)`` commits it, so that what is computed
    from it stays there. A part that is cut itself, such as ``x[1]`` of a map in a map,
    is an array over the devices that hold it, each with its shard, and is committed.

    Args:
      x: an array, or a pytree of arrays. NumPy arrays are indexed. So are tracers:
        inside `jax.jit`, `jax.grad` and so on this is ``x[i]``.
      i: the element, negative from the end; or a slice without a step; or a tuple of
        these. A slice is within one device's shard, or has all of the shards that it
        meets.
      axis: the axis, which the result has not, negative from the end; of a tuple, the
        first.

    Raises:
      TypeError: ``i`` is something else.
      ValueError: a slice ends within the shards of several devices, or has a step; the
        device is of another process; there is no such axis.
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
    """All elements along an axis, each on the device that holds it.

    ``[shard_of(x, 0), shard_of(x, 1), ...]``, with one program for each device.

    Args:
      x: as for `shard_of`. The leaves of a pytree are equally long along ``axis``.
      axis: the axis, which the results have not, negative from the end. Several axes
        give lists of lists: ``unstack(x, axis=(0, 1))[1][2]`` is ``x[1, 2]``.

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
    """Element 0 of each array: what all elements are, where they are equal.

    As `flax.jax_utils.unreplicate`. It is ``shard_of(tree, 0)``, or of an array that is
    spread over several processes, the first element on this one.

    Args:
      tree: as for `shard_of`.
      axis: the mapped axis, which the results have not.

    Raises:
      ValueError: as `shard_of`.
      IndexError: there is no element.

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
    if len(cuts.steps) == len(leaves) == 1:  # No bookkeeping for what shall be quick.
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
