"""What a picture of a layout shows: grids of shards, and the devices that hold them.

A grid has the last two cut dimensions of an array as rows and columns; one alone goes
down, as rows do, unless it is the array's last. Where more are cut, there is one grid
for each shard of the others.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmap.sharding.spec import ShardedAxis, ShardingSpec, Unstacked

# Stands for what is left out of a picture.
GAP = "..."


class Cell(NamedTuple):
    """A shard.

    Attributes:
      devices: those that hold it; () for a gap.
      holders: their numbers, such as ``0-3``.
    """

    devices: tuple[int, ...]
    holders: str


class Grid(NamedTuple):
    """Shards in rows and columns.

    Attributes:
      place: of the whole grid in the array, such as ``[0:2, :, :]``; "" if it is all.
      rows: what each row is called; one empty name if no dimension goes down.
      columns: what each column is called.
      cells: one for each row and column.
    """

    place: str
    rows: list[str]
    columns: list[str]
    cells: list[list[Cell]]


class Grids(NamedTuple):
    """All that a picture shows.

    Attributes:
      header: what is seen, in a line.
      ways: which dimensions go which way; "" if none is cut.
      down, across: the dimensions that rows and columns go along, if any.
      size: how long what is drawn is down and across, in elements of the array, the
        last two dimensions where these are not cut; None where there is no such.
      grids: those to draw.
      left_out: how many more there are.
    """

    header: str
    ways: str
    down: int | None
    across: int | None
    size: tuple[int | None, int | None]
    grids: list[Grid]
    left_out: int


def grids_of(
    spec: ShardingSpec,
    shape: Sequence[int],
    devices: Sequence[int] = (),
    *,
    max_pieces: int = 8,
    max_grids: int = 4,
) -> Grids:
    """What to draw of an array of shape `shape`.

    Args:
      spec: how the array is cut.
      shape: the array's shape.
      devices: the numbers of the devices, in the order of the spec's mesh; () stands
        for 0, 1, 2 and so on.
      max_pieces: how many shards of a dimension to draw; the others become `...`.
      max_grids: how many grids to draw.

    Raises:
      ValueError: the shape does not fit the spec.

    >>> from shardmap.sharding.spec import Chunked, Replicated
    >>> spec = ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(4)))
    >>> found = grids_of(spec, (6,))
    >>> found.header
    '(6,) on 8 devices, (3,) on each: dimension 0 across'
    >>> found.grids[0].columns, [cell.holders for cell in found.grids[0].cells[0]]
    (['0:3', '3:6'], ['0-3', '4-7'])
    """
    shape = tuple(shape)
    shard_shape = spec.shard_shape(shape)  # Refuses a shape that does not fit.
    cut = [dim for dim, count in enumerate(spec.tile_counts) if count > 1]
    down, across = _directions(cut[-2:], len(shape))
    holders = _holders(spec, devices)
    shards = _shards(spec, shape, holders, cut[:-2], down, across)
    rows, columns = (_shown(len(each), max_pieces) for each in shards.labels)
    grids = [
        Grid(
            name,
            _picked(shards.labels[0], rows),
            _picked(shards.labels[1], columns),
            [[_cell(holders, row, column) for column in columns] for row in rows],
        )
        for name, holders in itertools.islice(shards.grids, max_grids)
    ]
    several = "" if spec.num_shards == 1 else "s"
    header = f"{shape} on {spec.num_shards} device{several}, "
    header += f"{tuple(shard_shape)} on each" if cut else "all of it on each"
    ways = _ways(down, across)
    return Grids(
        f"{header}: {ways}" if ways else header,
        ways,
        down,
        across,
        _size(shape, down, across),
        grids,
        shards.total - len(grids),
    )


class _Shards(NamedTuple):
    """The shards of an array, as grids.

    Attributes:
      labels: what all rows are called, and all columns.
      grids: where each grid is in the array, and the devices of its shards.
      total: how many grids there are.
    """

    labels: tuple[list[str], list[str]]
    grids: Iterator[tuple[str, np.ndarray]]
    total: int


def _shards(
    spec: ShardingSpec,
    shape: tuple[int, ...],
    holders: np.ndarray,
    outer: Sequence[int],
    down: int | None,
    across: int | None,
) -> _Shards:
    """The shards of an array, in a grid for each shard of its dimensions ``outer``."""
    counts = spec.tile_counts
    labels = [
        _labels(entry, size, count)
        for entry, size, count in zip(spec.sharding, shape, counts, strict=True)
    ]
    rows = [""] if down is None else labels[down]
    columns = [""] if across is None else labels[across]
    places = tuple(counts[dim] for dim in outer)
    holders = holders.reshape(*places, len(rows), len(columns), -1)
    grids = (
        (_place(labels, dict(zip(outer, place, strict=True))), holders[place])
        for place in np.ndindex(*places)
    )
    return _Shards((rows, columns), grids, math.prod(places))


def _ways(down: int | None, across: int | None) -> str:
    """Such as ``dimension 0 down, 1 across``; "" if none is cut."""
    found = [
        f"{dim} {way}"
        for dim, way in ((down, "down"), (across, "across"))
        if dim is not None
    ]
    return f"dimension {', '.join(found)}" if found else ""


def _directions(cut: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """Which of at most two cut dimensions goes down, and which across."""
    across = cut[-1] if cut and (len(cut) == 2 or cut[-1] == rank - 1) else None
    return next((dim for dim in cut if dim != across), None), across


def _place(labels: Sequence[Sequence[str]], chosen: Mapping[int, int]) -> str:
    """Where a grid is in the array; "" if that is cut along no other dimension."""
    if not chosen:
        return ""
    index = [
        labels[dim][chosen[dim]] if dim in chosen else ":" for dim in range(len(labels))
    ]
    return f"[{', '.join(index)}]"


def _picked(labels: Sequence[str], shards: Sequence[int | None]) -> list[str]:
    return [GAP if shard is None else labels[shard] for shard in shards]


def _cell(holders: np.ndarray, row: int | None, column: int | None) -> Cell:
    if row is None or column is None:
        return Cell((), GAP)
    devices = np.sort(holders[row, column])
    return Cell(tuple(devices.tolist()), ranges(devices))


def _size(
    shape: tuple[int, ...], down: int | None, across: int | None
) -> tuple[int | None, int | None]:
    """The lengths of the dimensions that are seen; of those not cut the last ones."""
    uncut = [dim for dim in range(len(shape)) if dim not in (down, across)]
    if across is None and uncut and (down is None or uncut[-1] > down):
        across = uncut.pop()
    if down is None and uncut and (across is None or uncut[-1] < across):
        down = uncut.pop()
    return (
        None if down is None else shape[down],
        None if across is None else shape[across],
    )


def _holders(spec: ShardingSpec, numbers: Sequence[int]) -> np.ndarray:
    """The devices of each shard: one dimension per array dimension, then the copies."""
    devices = np.array(numbers or range(spec.num_shards)).reshape(spec.mesh_shape)
    mesh_dim_of = {
        entry.axis: mesh_dim
        for mesh_dim, entry in enumerate(spec.mesh_mapping)
        if isinstance(entry, ShardedAxis)
    }
    sharded = [mesh_dim_of[axis] for axis in range(len(mesh_dim_of))]
    copies = [dim for dim in range(devices.ndim) if dim not in sharded]
    return devices.transpose(sharded + copies).reshape(*spec.tile_counts, -1)


def _labels(entry: object, size: int, count: int) -> list[str]:
    """What each shard of a dimension is called: an index or a slice."""
    if isinstance(entry, Unstacked):
        return [str(index) for index in range(count)]
    step = size // count
    return [f"{index * step}:{(index + 1) * step}" for index in range(count)]


def _shown(count: int, most: int) -> list[int | None]:
    """Which shards to draw; None stands for those left out before the last one."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def ranges(numbers: np.ndarray) -> str:
    """Writes `[0, 1, 2, 5]` as `0-2,5`, and the middle of a long list as dots.

    >>> ranges(np.array([0, 1, 2, 5])), ranges(np.arange(0, 20, 2))
    ('0-2,5', '0,2,...,18')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers.tolist()):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    if len(texts) > 4:
        texts = [*texts[:2], GAP, texts[-1]]
    return ",".join(texts)
