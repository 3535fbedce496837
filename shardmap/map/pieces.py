"""Taking arrays apart: the pieces along an axis, each from the device that holds it.

``y[i]`` on an array that lies on several devices is a program over all of them, and so
is its result. The functions here read the one device that holds element ``i``.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax

from shardmap.map.cuts import RefusedError, cuts_for, placed
from shardmap.map.rows import is_whole


def shard_of(x: Any, i: int, *, axis: int = 0) -> Any:
    """Element ``i`` along an axis, on the device that holds it and on no other.

    The value of ``x[i]``, without communication and without the other devices. Of a
    pytree, element ``i`` of each leaf.

    The result is not committed: it may meet arrays on any device, and `jax.jit` then
    runs where those are, or on the default device. ``jax.device_put(piece,
    piece.device)`` commits it, so that what is computed from it stays there.

    Args:
      x: an array, or a pytree of arrays, that are not cut but along ``axis``, each
        piece as long as you like. NumPy arrays are indexed. So are tracers: inside
        `jax.jit`, `jax.grad` and so on this is ``x[i]``.
      i: the element, negative from the end.
      axis: the axis, which the result has not, negative from the end.

    Raises:
      ValueError: an array is cut along another axis too, so that the element is on
        several devices; the device is of another process; there is no such axis.
      IndexError: ``i`` is out of range.

    Example:
      >>> import numpy as np
      >>> y = jax.device_put(np.arange(6).reshape(2, 3), jax.devices()[0])
      >>> shard_of(y, 1)
      Array([3, 4, 5], dtype=int32)
    """
    number = operator.index(i)
    leaves, tree = jax.tree.flatten(x)
    taken = _take("shard_of", x, leaves, axis, number)
    return jax.tree.unflatten(tree, [pieces[0] for pieces in taken])


def unstack(x: Any, *, axis: int = 0) -> list[Any]:
    """All elements along an axis, each on the device that holds it.

    ``[shard_of(x, 0), shard_of(x, 1), ...]``, with one program for each device.

    Args:
      x: as for `shard_of`. The leaves of a pytree are equally long along ``axis``.
      axis: the axis, which the results have not, negative from the end.

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
    lengths = [len(pieces) for pieces in taken]
    if len(set(lengths)) != 1:
        listed = "".join(
            f"\n  * {_name(x, k)} has {length}" for k, length in enumerate(lengths)
        )
        raise ValueError(
            "unstack needs arrays with equally many elements along axis "
            f"{axis}:{listed or ' there are no arrays'}"
        )
    return [jax.tree.unflatten(tree, elements) for elements in zip(*taken, strict=True)]


def unreplicate(tree: Any, *, axis: int = 0) -> Any:
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
    leaves = [_part_here(leaf, axis) for leaf in leaves]
    taken = _take("unreplicate", tree, leaves, axis, 0)
    return jax.tree.unflatten(structure, [pieces[0] for pieces in taken])


def _take(
    caller: str, tree: Any, leaves: Sequence[Any], axis: int, index: int | None
) -> list[list[Any]]:
    """For each leaf, the element at ``index`` in a list, or all of them."""
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
        for (leaf, position), piece in zip(step.targets, results, strict=True):
            taken[leaf][position] = piece
    for leaf, before in cuts.indexed:
        where = range(cuts.lengths[leaf]) if index is None else [index]
        taken[leaf] = [leaves[leaf][(*before, k)] for k in where]
    return taken


def _part_here(leaf: Any, axis: int) -> Any:
    """The first shard on this process of an array that others have parts of."""
    if not is_whole(leaf):
        return leaf
    shard = leaf.addressable_shards[0].data
    cut = [k for k, size in enumerate(leaf.shape) if shard.shape[k] != size]
    return shard if set(cut) <= {axis % max(leaf.ndim, 1)} else leaf


def _name(tree: Any, leaf: int) -> str:
    path, _ = jax.tree_util.tree_leaves_with_path(tree)[leaf]
    return f"x{jax.tree_util.keystr(path)}"
