"""Pictures: grids of shards and the devices that hold them.

The last two cut dimensions of an array are the rows and columns of a grid. One cut
dimension alone makes rows, or columns if it is the array's last. If more dimensions are
cut, there is one grid for each shard of the others.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardmap.sharding.spec import ShardingSpec, Unstacked

GAP = "..."
"""Stands for what is left out of a picture."""


class Grid(NamedTuple):
    """Shards in rows and columns.

    Attributes:
      place: the index of the grid in the array, such as ``[0:2, :, :]``; "" if it is
        the whole array.
      rows: the label of each row; one empty label if no dimension goes down.
      columns: the label of each column.
      cells: for each row and column the devices of the shard, such as ``0-3``.
    """

    place: str
    rows: list[str]
    columns: list[str]
    cells: list[list[str]]


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """The shards of an array, and the devices that hold them.

    Attributes:
      header: one line that says what is drawn.
      labels: for each dimension, those of its shards.
      holders: the devices of each: one dimension for each of ``labels``, and one.
    """

    header: str
    labels: Sequence[Sequence[str]]
    holders: np.ndarray

    @property
    def cut(self) -> list[int]:
        """The dimensions with several shards; none for a whole array."""
        return [dim for dim, each in enumerate(self.labels) if len(each) > 1]

    @property
    def copies(self) -> int:
        """The number of devices that hold each shard."""
        return self.holders.shape[-1]

    @property
    def _directions(self) -> tuple[int | None, int | None]:
        """The dimensions that go down and across."""
        *_, first, last = None, None, *self.cut
        if first is None and last != len(self.labels) - 1:
            return last, None
        return first, last

    @property
    def ways(self) -> str:
        """The direction of each dimension, such as ``dimension 0 down, 1 across``."""
        pairs = zip(self._directions, ("down", "across"), strict=True)
        parts = [f"{dim} {way}" for dim, way in pairs if dim is not None]
        return "dimension " * bool(parts) + ", ".join(parts)

    def grids(self, most: int = 8, most_grids: int = 4) -> tuple[list[Grid], str]:
        """The grids of boxes to draw, and what to say of further ones.

        Args:
          most: how many boxes of a dimension to draw; the others become `...`.
          most_grids: how many grids to draw.

        >>> from shardmap.sharding.spec import Chunked, Replicated, ShardedAxis
        >>> spec = ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(4)))
        >>> drawing = drawing_of_spec(spec, (6,))
        >>> drawing.header, drawing.ways
        ('(6,) on 8 devices, (3,) on each', 'dimension 0 across')
        >>> [grid], more = drawing.grids()
        >>> grid.columns, grid.cells
        (['0:3', '3:6'], [['0-3', '4-7']])
        """
        outer = self.cut[:-2]
        counts = tuple(len(self.labels[dim]) for dim in outer)
        all_rows, all_columns = (
            [""] if dim is None else self.labels[dim] for dim in self._directions
        )
        boxes = self.holders.reshape(*counts, len(all_rows), len(all_columns), -1)
        rows, columns = (_shown(len(each), most) for each in (all_rows, all_columns))

        def cell(*place: int | None) -> str:
            return GAP if None in place else ranges(boxes[place])

        def grid(place: tuple[int, ...]) -> Grid:
            index = [":"] * len(self.labels)
            for dim, number in zip(outer, place, strict=True):
                index[dim] = self.labels[dim][number]
            return Grid(
                f"[{', '.join(index)}]" if outer else "",
                [GAP if row is None else all_rows[row] for row in rows],
                [GAP if column is None else all_columns[column] for column in columns],
                [[cell(*place, row, column) for column in columns] for row in rows],
            )

        places = itertools.islice(np.ndindex(*counts), most_grids)
        left_out = math.prod(counts) - most_grids
        more = f"{GAP} and {left_out:,} more" if left_out > 0 else ""
        return [*map(grid, places)], more


def drawing_of_spec(
    spec: ShardingSpec, shape: tuple[int, ...], devices: Sequence[int] = ()
) -> Drawing:
    """The shards of an array, and the devices that hold them.

    The devices are in the order of the spec's mesh; () stands for 0, 1, 2 and so on.
    """
    shard_shape = spec.shard_shape(shape)  # Refuses a shape that does not fit.
    counts = spec.tile_counts
    labels = [
        _labels(entry, size, count)
        for entry, size, count in zip(spec.sharding, shape, counts, strict=True)
    ]
    several = "s" * (spec.num_shards != 1)
    held = tuple(shard_shape) if math.prod(counts) > 1 else "all of it"
    numbers = np.array(devices or range(spec.num_shards))
    return Drawing(
        f"{shape} on {spec.num_shards} device{several}, {held} on each",
        labels,
        numbers[spec.stacked().tile_assignment()].reshape(*counts, -1),
    )


def _labels(entry: object, size: int, count: int) -> list[str]:
    """The label of each shard of a dimension: an index or a slice."""
    if isinstance(entry, Unstacked):
        return [str(index) for index in range(count)]
    step = size // count
    return [f"{index * step}:{(index + 1) * step}" for index in range(count)]


def _shown(count: int, most: int) -> list[int | None]:
    """The shards to draw, the last one included; None marks the gap."""
    if count > most:
        return [*range(most - 2), None, count - 1]
    return [*range(count)]


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
