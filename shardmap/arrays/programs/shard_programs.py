"""The programs that take elements from shards, cached by layout."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardmap._jax.types import Value
from shardmap.arrays.array_likes import boxes
from shardmap.arrays.programs.on_device import Operand, operand, program
from shardmap.sharding.conversions import axes_in
from shardmap.sharding.spec import Chunked, ShardedAxis, ShardingSpec


class Placed(NamedTuple):
    """The type and the sharding of a leaf, which determine its cuts."""

    operand: Operand
    sharding: Sharding | None
    """None for a tracer, or an array on the host."""


def placed(leaf: Value) -> Placed:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return Placed(operand(leaf), leaf.sharding)
    return Placed(Operand(np.shape(leaf), None), None)


class Span(NamedTuple):
    """A slice without a step. Slices themselves are not hashable before Python 3.12."""

    start: int | None
    stop: int | None


Index: TypeAlias = int | tuple[int | Span, ...] | Literal["first"] | None
"""One element; a part along several axes; the first element on this process; or all
elements, each by itself."""


class DeviceStep(NamedTuple):
    """The program of one device."""

    run: Callable[..., list[jax.Array]]
    shards: Sequence[tuple[int, int]]
    """Leaf, and number of its shard."""
    offsets: Sequence[np.int32]
    targets: Sequence[tuple[int, int]]
    """Leaf, and position in its list of parts."""


class Join(NamedTuple):
    """An array that is made of parts on several devices."""

    leaf: int
    shape: tuple[int, ...]
    shardings: Sequence[Sharding]
    """One for each array; its parts are in a row, one for each device."""


class Cuts(NamedTuple):
    lengths: Sequence[int]
    """How many parts each leaf gives."""
    steps: Sequence[DeviceStep]
    joins: Sequence[Join]
    indexed: Sequence[tuple[int, Sequence[tuple[int | slice, ...]]]]
    """A leaf without a sharding, and the indices of its parts."""


class RefusedError(Exception):
    """An error about one leaf, whose name only the caller knows."""

    def __init__(self, leaf: int, error: Exception) -> None:
        super().__init__(str(error))
        self.leaf, self.kind = leaf, type(error)


@functools.lru_cache(maxsize=4096)
def cuts_for(
    leaves: tuple[Placed, ...], axis: int | tuple[int, ...], index: Index
) -> Cuts:
    """The programs that take ``index`` of each leaf.

    Args:
      leaves: the arrays.
      axis: the first axis of the index; or for all elements, the axes to remove.
      index: which elements.

    Raises:
      RefusedError: the index does not fit a leaf.
    """
    lengths, indexed, joins = [], [], []
    # One program for all that is on a device.
    work: dict[jax.Device, list[_ShardSlice]] = {}
    for number, (kind, sharding) in enumerate(leaves):
        try:
            wanted = _wanted(kind.shape, sharding, axis, index)
            if sharding is None:
                indexed.append((number, wanted.indices(kind.shape)))
                lengths.append(wanted.results)
                continue
            parts = list(_parts(number, kind, sharding, wanted))
        except (IndexError, ValueError) as error:
            raise RefusedError(number, error) from None
        for part in parts:
            work.setdefault(part.device, []).append(part)
        lengths.append(sum(len(part.positions) for part in parts))
        if lengths[-1] > wanted.results:
            joins.append(_join(number, sharding, wanted, parts))
    steps = []
    for device, parts in work.items():
        operands = [part.operand for part in parts]
        offsets = [np.int32(offset) for part in parts for offset in part.offsets]
        cut = _SliceProgram(tuple((part.windows, part.dropped) for part in parts))
        steps.append(
            DeviceStep(
                program(device, cut, (*operands, *map(operand, offsets))),
                [(part.leaf, part.shard) for part in parts],
                offsets,
                [(part.leaf, k) for part in parts for k in part.positions],
            )
        )
    return Cuts(lengths, steps, joins, indexed)


class _Wanted(NamedTuple):
    """The part of a leaf that an index names."""

    bounds: Sequence[tuple[int, int]]
    """Start and stop along each dimension."""
    dropped: tuple[int, ...]
    """The dimensions to remove: there is one result for each index along them."""

    @property
    def places(self) -> tuple[int, ...]:
        """The number of indices along each dropped dimension."""
        return tuple(self.bounds[d][1] - self.bounds[d][0] for d in self.dropped)

    @property
    def results(self) -> int:
        """The number of results."""
        return math.prod(self.places)

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.bounds)) if d not in self.dropped)

    def indices(self, shape: Sequence[int]) -> list[tuple[int | slice, ...]]:
        """The index of each result in the global array."""
        index: list[int | slice] = [
            slice(None) if pair == (0, size) else slice(*pair)
            for pair, size in zip(self.bounds, shape, strict=True)
        ]
        found = []
        for place in itertools.product(*(range(*self.bounds[d]) for d in self.dropped)):
            for d, k in zip(self.dropped, place, strict=True):
                index[d] = k
            found.append(tuple(index))
        return found


def _wanted(
    shape: tuple[int, ...],
    sharding: Sharding | None,
    axis: int | tuple[int, ...],
    index: Index,
) -> _Wanted:
    """The part that an index names, with axes and indices from the front."""
    bounds = [(0, size) for size in shape]
    if index is None:
        axes = axis if isinstance(axis, tuple) else (axis,)
        dropped = tuple(_axis(shape, one) for one in axes)
        if len(set(dropped)) < len(dropped):
            raise ValueError(f"of shape {shape} lacks an axis once only, got {axis}")
        return _Wanted(bounds, dropped)
    assert isinstance(axis, int)
    first = _axis(shape, axis)
    if index == "first":
        held = [] if sharding is None else boxes(sharding, shape).values()
        items: tuple[int | Span, ...] = (
            min((box[first][0] for box in held), default=0),
        )
    else:
        items = index if isinstance(index, tuple) else (index,)
    dropped = ()
    for dimension, item in enumerate(items, first):
        size = shape[_axis(shape, dimension)]
        if isinstance(item, Span):
            start, stop, _ = slice(*item).indices(size)
            bounds[dimension] = start, max(start, stop)
            continue
        if not -size <= item < size:
            raise IndexError(
                f"of shape {shape} has size {size} along axis {dimension}: index "
                f"{item} is out of range"
            )
        bounds[dimension] = item % size, item % size + 1
        dropped += (dimension,)
    return _Wanted(bounds, dropped)


def _axis(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"of shape {shape} has no axis {axis}")
    return axis % len(shape)


class _ShardSlice(NamedTuple):
    """The part of one shard of a leaf."""

    leaf: int
    shard: int
    device: jax.Device
    operand: Operand
    windows: tuple[tuple[int, int], ...]
    """Each dimension of which not the whole shard is taken, and the length taken."""
    offsets: Sequence[int]
    """The start of each window."""
    dropped: tuple[int, ...]
    positions: Sequence[int]
    """The positions of the results."""


def _parts(
    leaf: int, kind: Operand, sharding: Sharding, wanted: _Wanted
) -> Iterator[_ShardSlice]:
    """The part of each shard; of replicas, the first on this process."""
    shape, bounds, dropped = kind.shape, wanted.bounds, wanted.dropped
    held = sharding.shard_shape(shape)
    sizes = [max(size, 1) for size in held]
    holders: dict[tuple[int, ...], tuple[int, jax.Device]] = {}
    for number, (device, box) in enumerate(boxes(sharding, shape).items()):
        block = tuple(start // n for (start, _), n in zip(box, sizes, strict=True))
        holders.setdefault(block, (number, device))
    blocks = [_blocks(*pair, n) for pair, n in zip(bounds, sizes, strict=True)]
    for d in wanted.kept:
        if len(blocks[d]) > 1 and any(edge % sizes[d] for edge in bounds[d]):
            raise ValueError(
                f"of shape {shape} is cut along axis {d} into shards of {sizes[d]}, "
                f"and {bounds[d][0]}:{bounds[d][1]} is neither whole shards nor within "
                "one: index it as x[i], or take whole shards"
            )
    per_result = [len(blocks[d]) for d in wanted.kept]
    for block in itertools.product(*blocks):
        if block not in holders:
            where = " and ".join(
                f"its elements {k * n} to {k * n + n - 1} along axis {d}"
                for d, (k, n) in enumerate(zip(block, sizes, strict=True))
                if n < shape[d]
            )
            raise ValueError(f"has {where} on a device of another process")
        # The part of this block, counted in the global array.
        inside = [
            (max(start, k * n), min(stop, k * n + n))
            for (start, stop), k, n in zip(bounds, block, sizes, strict=True)
        ]
        windows = {
            d: (start - block[d] * sizes[d], stop - start)
            for d, (start, stop) in enumerate(inside)
            if stop - start < held[d]
        }
        part = _number([block[d] - blocks[d][0] for d in wanted.kept], per_result)
        places = [[k - bounds[d][0] for k in range(*inside[d])] for d in dropped]
        yield _ShardSlice(
            leaf,
            *holders[block],
            operand=kind._replace(shape=held),
            windows=tuple((d, length) for d, (_, length) in windows.items()),
            offsets=[offset for offset, _ in windows.values()],
            dropped=dropped,
            positions=[
                _number(place, wanted.places) * math.prod(per_result) + part
                for place in itertools.product(*places)
            ],
        )


def _blocks(start: int, stop: int, size: int) -> range:
    """The numbers of the blocks of a size that a range of elements meets."""
    last = max(stop - 1, 0) // size
    return range(min(start // size, last), last + 1)


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    """The place in row-major order."""
    number = 0
    for k, size in zip(place, sizes, strict=True):
        number = number * size + k
    return number


def _join(
    leaf: int, sharding: Sharding, wanted: _Wanted, parts: Sequence[_ShardSlice]
) -> Join:
    """The arrays that the parts of a leaf make, cut as the leaf."""
    shape = tuple(
        stop - start for start, stop in (wanted.bounds[d] for d in wanted.kept)
    )
    sizes = [max(n, 1) for n in parts[0].operand.shape]
    counts = [len(_blocks(*wanted.bounds[d], sizes[d])) for d in wanted.kept]
    cuts = [
        _mesh_axes(sharding, d, n) for d, n in zip(wanted.kept, counts, strict=True)
    ]
    if None in cuts:
        names, entries = None, [Chunked(n) if n > 1 else None for n in counts]
    else:
        names = [name for cut in cuts for name in cut or ()]
        entries = [Chunked(tuple(cut.values())) if cut else None for cut in cuts]
    number = len(names) if names else sum(n > 1 for n in counts)
    spec = ShardingSpec(entries, [ShardedAxis(k) for k in range(number)])

    @functools.cache
    def layout(devices: tuple[jax.Device, ...]) -> Sharding:
        return spec.named_sharding(devices, names)

    devices = {k: part.device for part in parts for k in part.positions}
    count = math.prod(counts)
    return Join(
        leaf,
        shape,
        [
            layout(tuple(devices[k * count + j] for j in range(count)))
            for k in range(wanted.results)
        ],
    )


def _mesh_axes(sharding: Sharding, dimension: int, count: int) -> dict[str, int] | None:
    """The mesh axes along which a dimension has ``count`` blocks, and their sizes.

    None if they have no names, or are only a part of the axes that cut the dimension.
    """
    if count == 1:
        return {}
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = {
        name: sharding.mesh.shape[name]
        for name in axes_in(sharding.spec[dimension])
        if sharding.mesh.shape[name] > 1
    }
    if len(sizes) == 1:
        return dict.fromkeys(sizes, count)
    return sizes if math.prod(sizes.values()) == count else None


@dataclass(frozen=True)
class _SliceProgram:
    """A program that cuts shards. It takes these, then the starts of windows."""

    shards: tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], ...]
    """The windows and dropped dimensions of each shard; see `_ShardSlice`."""

    def __call__(self, *args: jax.Array) -> list[Any]:
        offsets = iter(args[len(self.shards) :])
        parts = []
        for shard, (windows, dropped) in zip(args, self.shards, strict=False):
            for axis, length in windows:
                shard = jax.lax.dynamic_slice_in_dim(shard, next(offsets), length, axis)
            for place in np.ndindex(*(shard.shape[d] for d in dropped)):
                parts.append(_element(shard, dict(zip(dropped, place, strict=True))))
        return parts


def _element(shard: jax.Array, index: dict[int, int]) -> jax.Array:
    starts = [index.get(d, 0) for d in range(shard.ndim)]
    stops = [index.get(d, n - 1) + 1 for d, n in enumerate(shard.shape)]
    return jax.lax.squeeze(jax.lax.slice(shard, starts, stops), tuple(index))
