"""Taking arrays apart: the elements of an axis, each from the device that holds it.

``y[i]`` on an array that is on several devices is a program over all of them, and so
is its result. The functions here read the one device that holds element ``i``.

A compiled program does it: indexing `jax.Array.addressable_data` takes 2.7 to 5.4 times
its CPU time for `shard_of` and 3.7 to 16 times for `unstack`, and commits the result to
the device.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Sharding

from shardmap._jax.types import PyTree, Value
from shardmap.arrays.array_likes import Box, boxes
from shardmap.arrays.on_device import Operand, operand, program
from shardmap.arrays.trees import leaf_paths
from shardmap.units import shown

T = TypeVar("T")

Index: TypeAlias = tuple[int, ...] | Literal["first"] | None
"""One element; the first one on this process; or all of them."""


def shard_of(x: T, i: int | tuple[int, ...], *, axis: int = 0) -> T:
    """Returns element ``i`` of an array along an axis, on the device that holds it.

    The value is ``x[i]``, without communication. For a pytree, each leaf is indexed. (A
    `Shard` is something else: one part of the work of a `plan`.)

    ``i`` may index several axes, beginning with ``axis``: ``shard_of(x, (1, 2))`` is
    ``x[1, 2]``, an element of a map in a map. If several devices hold copies, the first
    is read.

    The result is not committed to its device: it can be combined with arrays on any
    device, and `jax.jit` of it alone runs on the default device. To compute on the
    device of the result, commit it with ``jax.device_put(part, part.device)``.

    Args:
      x: an array, or a pytree of arrays. NumPy arrays and tracers are indexed as
        ``x[i]``.
      i: an int, negative from the end, or a tuple of ints.
      axis: the axis to index, negative from the end; the first one if ``i`` is a tuple.

    Raises:
      TypeError: ``i`` is not an index of this kind, such as a slice.
      ValueError: the element is on several devices, such as ``x[1]`` of a map in a
        map, or the device belongs to another process, or there is no such axis.
      IndexError: ``i`` is out of range.

    Example:
      >>> import numpy as np
      >>> y = jax.device_put(np.arange(6).reshape(2, 3), jax.devices()[0])
      >>> shard_of(y, 1)
      Array([3, 4, 5], dtype=int32)
      >>> shard_of(y, (1, 2))
      Array(5, dtype=int32)
    """
    index = tuple(map(_integer, i)) if isinstance(i, tuple) else (_integer(i),)
    leaves, tree = jax.tree.flatten(x)
    taken = _take("shard_of", x, leaves, (axis,), index)
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
    axes = axis if isinstance(axis, tuple) else (axis,)
    taken = _take("unstack", x, leaves, axes, None)
    sizes = [tuple(np.shape(leaf)[one] for one in axes) for leaf in leaves]
    if not leaves:
        raise ValueError(f"unstack needs arrays to take apart, got {shown(x)}")
    if other := next((k for k, size in enumerate(sizes) if size != sizes[0]), None):
        names, counts = leaf_paths("x", x), [" x ".join(map(str, s)) for s in sizes]
        raise ValueError(
            f"unstack needs arrays with equally many elements along axis {axis}: "
            f"{names[0]} has {counts[0]}, {names[other]} has {counts[other]}"
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
    taken = _take("unreplicate", tree, leaves, (axis,), "first")
    return jax.tree.unflatten(structure, [parts[0] for parts in taken])


def _integer(i: SupportsIndex) -> int:
    try:
        return operator.index(i)
    except TypeError:
        slices = " To take a slice, index the array itself, as x[2:4]."
        raise TypeError(
            "shard_of takes an int or a tuple of ints as i, but got "
            f"{shown(i)} of type {type(i).__name__}."
            f"{slices if isinstance(i, slice) else ''}"
        ) from None


def _take(
    caller: str, tree: PyTree, leaves: Sequence[Any], axes: Sequence[int], index: Index
) -> list[list[Any]]:
    """For each leaf, the element at ``index`` in a list, or all its elements."""
    try:
        reads = _reads(tuple(map(_leaf_type, leaves)), tuple(axes), index)
    except _LeafError as error:
        name = leaf_paths("x", tree)[error.leaf]
        raise error.kind(f"{caller}: {name} {error}") from None
    if len(reads.steps) == len(leaves) == 1:  # The fast path of one shard.
        (step,) = reads.steps
        shard = leaves[0].addressable_data(step.shards[0][1])
        return [step.run(shard, *step.offsets)]
    taken: list[list[Any]] = [[None] * length for length in reads.lengths]
    for step in reads.steps:
        shards = [leaves[leaf].addressable_data(n) for leaf, n in step.shards]
        results = step.run(*shards, *step.offsets)
        for (leaf, position), part in zip(step.targets, results, strict=True):
            taken[leaf][position] = part
    for leaf, indices in reads.indexed:
        taken[leaf] = [leaves[leaf][one] for one in indices]
    return taken


def _nested(elements: Iterator[Any], sizes: Sequence[int]) -> Any:
    """Lists of these sizes in each other, filled row-major."""
    if len(sizes) == 1:
        return list(elements)
    return [
        _nested(itertools.islice(elements, math.prod(sizes[1:])), sizes[1:])
        for _ in range(sizes[0])
    ]


# The programs that take elements, one for each device, cached by layout


class _LeafType(NamedTuple):
    """The type and the sharding of a leaf."""

    operand: Operand
    sharding: Sharding | None
    """None for a tracer, or an array on the host."""


def _leaf_type(leaf: Value) -> _LeafType:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return _LeafType(operand(leaf), leaf.sharding)
    return _LeafType(Operand(np.shape(leaf), None), None)


class _Step(NamedTuple):
    """The program of one device."""

    run: Callable[..., list[jax.Array]]
    shards: Sequence[tuple[int, int]]
    """Leaf, and number of its shard."""
    offsets: Sequence[np.int32]
    targets: Sequence[tuple[int, int]]
    """Leaf, and position in its list of parts."""


class _Reads(NamedTuple):
    lengths: Sequence[int]
    """How many elements each leaf gives."""
    steps: Sequence[_Step]
    indexed: Sequence[tuple[int, Sequence[tuple[Any, ...]]]]
    """A leaf without a sharding, and the indices of its elements."""


class _LeafError(Exception):
    """An error about one leaf, whose name only the caller knows."""

    def __init__(self, leaf: int, error: Exception) -> None:
        super().__init__(str(error))
        self.leaf, self.kind = leaf, type(error)


class _ShardRead(NamedTuple):
    """What one shard has of elements.

    Attributes:
      leaf, shard, device: where it is.
      operand: the type of the shard.
      dropped: the dimensions to remove.
      offsets: the place of the only element along these; None: all elements.
      positions: of the parts, in the list of the leaf's.
    """

    leaf: int
    shard: int
    device: jax.Device
    operand: Operand
    dropped: tuple[int, ...]
    offsets: tuple[int, ...] | None
    positions: Sequence[int]


@functools.lru_cache(maxsize=4096)
def _reads(
    leaves: tuple[_LeafType, ...], axes: tuple[int, ...], index: Index
) -> _Reads:
    """The programs that take elements of each leaf.

    Raises:
      _LeafError: the axes or the index do not fit a leaf.
    """
    lengths, indexed = [], []
    # One program for all that is on a device.
    work: dict[jax.Device, list[_ShardRead]] = {}
    for number, (kind, sharding) in enumerate(leaves):
        try:
            dropped, ranges = _elements(kind.shape, sharding, axes, index)
            lengths.append(math.prod(map(len, ranges)))
            if sharding is None:
                indexed.append((number, _indices(len(kind.shape), dropped, ranges)))
                continue
            parts = _shard_reads(number, kind, sharding, dropped, ranges, index is None)
        except (IndexError, ValueError) as error:
            raise _LeafError(number, error) from None
        for part in parts:
            work.setdefault(part.device, []).append(part)
    steps = []
    for device, parts in work.items():
        offsets = [np.int32(k) for part in parts for k in part.offsets or ()]
        take = _TakeElements(
            tuple((part.dropped, part.offsets is None) for part in parts)
        )
        operands = [part.operand for part in parts]
        steps.append(
            _Step(
                program(device, take, (*operands, *map(operand, offsets))),
                [(part.leaf, part.shard) for part in parts],
                offsets,
                [(part.leaf, k) for part in parts for k in part.positions],
            )
        )
    return _Reads(lengths, steps, indexed)


def _indices(
    rank: int, dropped: Sequence[int], ranges: Sequence[range]
) -> list[tuple[Any, ...]]:
    """The index of each element in the whole array."""
    indices = []
    for place in itertools.product(*ranges):
        at = dict(zip(dropped, place, strict=True))
        indices.append(tuple(at.get(d, slice(None)) for d in range(rank)))
    return indices


def _elements(
    shape: tuple[int, ...],
    sharding: Sharding | None,
    axes: Sequence[int],
    index: Index,
) -> tuple[tuple[int, ...], list[range]]:
    """The dimensions to remove, and the indices along each."""
    if isinstance(index, tuple):
        first = _from_front(shape, axes[0])
        axes = range(first, first + len(index))
    dropped = tuple(_from_front(shape, axis) for axis in axes)
    if len(set(dropped)) < len(dropped):
        raise ValueError(f"of shape {shape} lacks an axis once only, got {tuple(axes)}")
    if index is None:
        return dropped, [range(shape[d]) for d in dropped]
    if index == "first":
        held = [] if sharding is None else boxes(sharding, shape).values()
        index = (min((box[dropped[0]][0] for box in held), default=0),)
    for d, k in zip(dropped, index, strict=True):
        if not -shape[d] <= k < shape[d]:
            raise IndexError(
                f"of shape {shape} has size {shape[d]} along axis {d}: index {k} is "
                "out of range"
            )
    counted = [k % shape[d] for d, k in zip(dropped, index, strict=True)]
    return dropped, [range(k, k + 1) for k in counted]


def _from_front(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"of shape {shape} has no axis {axis}")
    return axis % len(shape)


def _shard_reads(
    leaf: int,
    kind: Operand,
    sharding: Sharding,
    dropped: tuple[int, ...],
    ranges: Sequence[range],
    takes_all: bool,
) -> list[_ShardRead]:
    """The part of each shard; of replicas, the first on this process."""
    shape, held = kind.shape, sharding.shard_shape(kind.shape)
    for d in range(len(shape)):
        if d not in dropped and held[d] < shape[d]:
            raise ValueError(
                f"of shape {shape} is cut along axis {d} too, and each element is on "
                f"{shape[d] // held[d]} devices: index that axis as well, or use x[i] "
                "or jax.device_get(x)."
            )
    counts = list(map(len, ranges))
    positions = np.arange(math.prod(counts)).reshape(counts)
    missing = np.ones(counts, bool)
    parts: dict[Box, _ShardRead] = {}
    for number, (device, box) in enumerate(boxes(sharding, shape).items()):
        inside = [
            range(max(box[d][0], wanted.start), min(box[d][1], wanted.stop))
            for d, wanted in zip(dropped, ranges, strict=True)
        ]
        if box in parts or not all(inside):
            continue
        place = tuple(
            slice(each.start - wanted.start, each.stop - wanted.start)
            for each, wanted in zip(inside, ranges, strict=True)
        )
        missing[place] = False
        offsets = (
            each.start - box[d][0] for d, each in zip(dropped, inside, strict=True)
        )
        parts[box] = _ShardRead(
            leaf,
            number,
            device,
            kind._replace(shape=held),
            dropped,
            None if takes_all else tuple(offsets),
            positions[place].ravel().tolist(),
        )
    if missing.any():
        first = np.argwhere(missing)[0]
        where = " and ".join(
            f"its element {wanted[k]} along axis {d}"
            for d, wanted, k in zip(dropped, ranges, first, strict=True)
        )
        raise ValueError(f"has {where} on a device of another process")
    return list(parts.values())


@dataclasses.dataclass(frozen=True)
class _TakeElements:
    """A program that takes elements of shards. It takes these, then their offsets."""

    shards: tuple[tuple[tuple[int, ...], bool], ...]
    """For each shard, the dimensions to remove, and whether to take all elements."""

    def __call__(self, *args: jax.Array) -> list[Any]:
        offsets = iter(args[len(self.shards) :])
        parts = []
        for shard, (dropped, takes_all) in zip(args, self.shards, strict=False):
            if not takes_all:
                for d in dropped:
                    start = next(offsets)
                    if shard.shape[d] > 1:
                        shard = jax.lax.dynamic_slice_in_dim(shard, start, 1, d)
                parts.append(jax.lax.squeeze(shard, dropped))
                continue
            for place in np.ndindex(*(shard.shape[d] for d in dropped)):
                at = dict(zip(dropped, place, strict=True))
                starts = [at.get(d, 0) for d in range(shard.ndim)]
                stops = [at.get(d, n - 1) + 1 for d, n in enumerate(shard.shape)]
                parts.append(
                    jax.lax.squeeze(jax.lax.slice(shard, starts, stops), dropped)
                )
        return parts
