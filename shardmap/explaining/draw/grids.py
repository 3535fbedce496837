"""Pictures: grids of shards and the devices that hold them, and of a mesh.

The last two cut dimensions of an array are the rows and columns of a grid. One cut
dimension alone makes rows, or columns if it is the array's last. If more dimensions are
cut, there is one grid for each shard of the others.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmap.sharding.spec import ShardedAxis, ShardingSpec, Unstacked

GAP = "..."
"""Stands for what is left out of a picture."""


class Cell(NamedTuple):
    """A shard.

    Attributes:
      number: the number of the shard in the order of the array; None for a gap.
      holders: the numbers of the devices that hold it, such as ``0-3``.
    """

    number: int | None
    holders: str


class Grid(NamedTuple):
    """Shards in rows and columns.

    Attributes:
      place: the index of the grid in the array, such as ``[0:2, :, :]``; "" if it is
        the whole array.
      rows: the label of each row; one empty label if no dimension goes down.
      columns: the label of each column.
      cells: one cell for each row and column.
    """

    place: str
    rows: list[str]
    columns: list[str]
    cells: list[list[Cell]]


class Grids(NamedTuple):
    """All that a picture shows.

    Attributes:
      header: one line with the shapes of the array and of a shard.
      down, across: the names of the dimensions of rows and columns, if any.
      grids: the grids to draw.
      left_out: the number of further grids.
      copies: the number of devices that hold each shard.
      is_mesh: whether the boxes are devices of a mesh, not shards.
    """

    header: str
    down: str | None
    across: str | None
    grids: list[Grid]
    left_out: int
    copies: int
    is_mesh: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut: every device holds the whole array."""
        return self.down is None and self.across is None

    @property
    def ways(self) -> str:
        """The direction of each dimension, such as ``dimension 0 down, 1 across``."""
        parts = [
            f"{name} {way}"
            for name, way in ((self.down, "down"), (self.across, "across"))
            if name is not None
        ]
        what = "devices: " if self.is_mesh else "dimension "
        return what * bool(parts) + ", ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """Boxes in the order of an array or of a mesh, and what is in each.

    Attributes:
      header: one line that says what is drawn.
      labels: for each dimension, those of its boxes.
      holders: the numbers in each box: one dimension for each of ``labels``, and one.
      names: the names of the dimensions; () for 0, 1, 2 and so on.
      max_pieces: how many boxes of a dimension to draw; the others become `...`.
      max_grids: how many grids to draw.
    """

    header: str
    labels: Sequence[Sequence[str]]
    holders: np.ndarray
    names: tuple[str, ...] = ()
    max_pieces: int = 8
    max_grids: int = 4

    def grids(self) -> Grids:
        """The grids of boxes to draw.

        >>> from shardmap.sharding.spec import Chunked, Replicated
        >>> spec = ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(4)))
        >>> shown = drawing_of_spec(spec, (6,)).grids()
        >>> shown.header, shown.ways
        ('(6,) on 8 devices, (3,) on each', 'dimension 0 across')
        >>> shown.grids[0].columns, [cell.holders for cell in shown.grids[0].cells[0]]
        (['0:3', '3:6'], ['0-3', '4-7'])
        """
        labels, holders = self.labels, self.holders
        cut = [dim for dim, each in enumerate(labels) if len(each) > 1]
        down, across = _directions(cut[-2:], len(labels))
        outer = cut[:-2]
        outer_counts = tuple(len(labels[dim]) for dim in outer)
        all_rows = [""] if down is None else labels[down]
        all_columns = [""] if across is None else labels[across]
        holders = holders.reshape(*outer_counts, len(all_rows), len(all_columns), -1)
        numbers = np.arange(math.prod(holders.shape[:-1])).reshape(holders.shape[:-1])
        rows, columns = (
            _shown(each, self.max_pieces) for each in (all_rows, all_columns)
        )
        grids = [
            Grid(
                _place(labels, dict(zip(outer, place, strict=True))),
                _picked(all_rows, rows),
                _picked(all_columns, columns),
                list(_cells(holders[place], numbers[place], rows, columns)),
            )
            for place in itertools.islice(np.ndindex(*outer_counts), self.max_grids)
        ]
        names = self.names or tuple(map(str, range(len(labels))))
        return Grids(
            self.header,
            None if down is None else names[down],
            None if across is None else names[across],
            grids,
            math.prod(outer_counts) - len(grids),
            holders.shape[-1],
            bool(self.names),
        )


def drawing_of_spec(
    spec: ShardingSpec,
    shape: tuple[int, ...],
    devices: Sequence[int] = (),
    max_pieces: int = 8,
    max_grids: int = 4,
) -> Drawing:
    """The shards of an array, and the devices that hold them.

    Args:
      spec: how the array is cut.
      shape: the shape of the array.
      devices: the numbers of the devices, in the order of the spec's mesh; () stands
        for 0, 1, 2 and so on.
      max_pieces: how many shards of a dimension to draw.
      max_grids: how many grids to draw.

    Raises:
      ValueError: the shape does not fit the spec.
    """
    shard_shape = spec.shard_shape(shape)  # Refuses a shape that does not fit.
    counts = spec.tile_counts
    labels = [
        _labels(entry, size, count)
        for entry, size, count in zip(spec.sharding, shape, counts, strict=True)
    ]
    several = "s" * (spec.num_shards != 1)
    is_cut = any(count > 1 for count in counts)
    held = f"{tuple(shard_shape)} on each" if is_cut else "all of it on each"
    return Drawing(
        f"{shape} on {spec.num_shards} device{several}, {held}",
        labels,
        _holders(spec, devices),
        max_pieces=max_pieces,
        max_grids=max_grids,
    )


def drawing_of_mesh(
    mesh: Sequence[tuple[str, int]], devices: Sequence[int] = ()
) -> Drawing:
    """The device at each position of a mesh.

    Args:
      mesh: the names and sizes of its axes.
      devices: the numbers of its devices; () stands for 0, 1, 2 and so on.

    >>> shown = drawing_of_mesh([("data", 2), ("model", 2)], (0, 2, 1, 3)).grids()
    >>> shown.ways, [[cell.holders for cell in row] for row in shown.grids[0].cells]
    ("devices: 'data' down, 'model' across", [['0', '2'], ['1', '3']])
    """
    sizes = tuple(size for _, size in mesh)
    numbers = np.array(devices or range(math.prod(sizes))).reshape(*sizes, 1)
    labels = [list(map(str, range(size))) for size in sizes]
    names = tuple(repr(name) for name, _ in mesh)
    return Drawing("mesh", labels, numbers, names=names)


def _directions(cut: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """The cut dimensions that go down and across."""
    across = cut[-1] if cut and (len(cut) == 2 or cut[-1] == rank - 1) else None
    return next((dim for dim in cut if dim != across), None), across


def _labels(entry: object, size: int, count: int) -> list[str]:
    """The label of each shard of a dimension: an index or a slice."""
    if isinstance(entry, Unstacked):
        return [str(index) for index in range(count)]
    step = size // count
    return [f"{index * step}:{(index + 1) * step}" for index in range(count)]


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


def _place(labels: Sequence[Sequence[str]], chosen: Mapping[int, int]) -> str:
    """The index of a grid in the array; "" if there is only one."""
    if not chosen:
        return ""
    index = [
        labels[dim][chosen[dim]] if dim in chosen else ":" for dim in range(len(labels))
    ]
    return f"[{', '.join(index)}]"


def _shown(labels: Sequence[str], most: int) -> list[int | None]:
    """The shards to draw, the last one included; None marks the gap."""
    count = len(labels)
    if count > most:
        return [*range(most - 2), None, count - 1]
    return [*range(count)]


def _picked(labels: Sequence[str], shards: Sequence[int | None]) -> list[str]:
    return [GAP if shard is None else labels[shard] for shard in shards]


def _cells(
    holders: np.ndarray,
    numbers: np.ndarray,
    rows: Sequence[int | None],
    columns: Sequence[int | None],
) -> Iterator[list[Cell]]:
    for row in rows:
        yield [
            Cell(None, GAP)
            if row is None or column is None
            else Cell(int(numbers[row, column]), ranges(holders[row, column]))
            for column in columns
        ]


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
