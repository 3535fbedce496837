"""A picture in text of how an array lies on devices.

>>> from shardmap import Chunked, Replicated, ShardedAxis, ShardingSpec
>>> spec = ShardingSpec((Chunked(2), Chunked(2)), (ShardedAxis(0), ShardedAxis(1)))
>>> print(picture(spec, (6, 8)))
(6, 8) on 4 devices, (3, 4) on each: dimension 0 down, 1 across
          0:4   4:8
        +-----+-----+
    0:3 |  0  |  1  |
        +-----+-----+
    3:6 |  2  |  3  |
        +-----+-----+

Each box is one piece of the array. The numbers in it are the devices that hold it,
counted row-major over the mesh, so a box with several numbers is a piece with copies:

>>> print(picture(ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(4))), (6,)))
(6,) on 8 devices, (3,) on each: dimension 0 across
       0:3   3:6
     +-----+-----+
     | 0-3 | 4-7 |
     +-----+-----+
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from shardmap.sharding.spec import ShardedAxis, ShardingSpec, Unstacked

# Stands for the pieces of a dimension that are left out of a picture.
GAP = "..."


def picture(
    spec: ShardingSpec, shape: Sequence[int], *, max_pieces: int = 8, max_grids: int = 4
) -> str:
    """Draws which devices hold which piece of an array.

    The last two cut dimensions make a grid, rows and columns; where more dimensions
    are cut, there is one grid for each piece of the others.

    Args:
      spec: how the array is cut.
      shape: the array's shape.
      max_pieces: how many pieces of a dimension to draw; the others become `...`.
      max_grids: how many grids to draw.

    Returns:
      The picture, without a newline at its end.

    >>> from shardmap import Replicated, ShardingSpec, Unstacked, ShardedAxis
    >>> print(picture(ShardingSpec((), (Replicated(4),)), ()))
    () on 4 devices, all of it on each
         +-----+
         | 0-3 |
         +-----+
    >>> print(picture(ShardingSpec((Unstacked(3), None), (ShardedAxis(0),)), (3, 5)))
    (3, 5) on 3 devices, (5,) on each: dimension 0 across
           0   1   2
         +---+---+---+
         | 0 | 1 | 2 |
         +---+---+---+
    """
    shape = tuple(shape)
    shard_shape = tuple(spec.shard_shape(shape))  # Refuses a shape that does not fit.
    holders = _holders(spec)
    counts = spec.tile_counts
    labels = [
        _labels(entry, size, count)
        for entry, size, count in zip(spec.sharding, shape, counts, strict=True)
    ]
    cut = [dim for dim, count in enumerate(counts) if count > 1]
    outer, row_dim, column_dim = cut[:-2], cut[-2:-1], cut[-1:]
    row_labels = labels[row_dim[0]] if row_dim else [""]
    column_labels = labels[column_dim[0]] if column_dim else [""]
    grids = holders.reshape(
        *(counts[dim] for dim in outer), len(row_labels), len(column_labels), -1
    )

    plural = "" if spec.num_shards == 1 else "s"
    header = f"{shape} on {spec.num_shards} device{plural}, "
    header += f"{shard_shape} on each" if cut else "all of it on each"
    ways = [f"{dim} down" for dim in row_dim] + [f"{dim} across" for dim in column_dim]
    lines = [f"{header}: dimension {', '.join(ways)}" if ways else header]
    places = np.ndindex(*grids.shape[: len(outer)])
    for place in itertools.islice(places, max_grids):
        if outer:
            index = [":"] * len(shape)
            for dim, piece in zip(outer, place, strict=True):
                index[dim] = labels[dim][piece]
            lines.append(f"  [{', '.join(index)}]")
        lines += _grid(grids[place], row_labels, column_labels, max_pieces)
    left_out = math.prod(grids.shape[: len(outer)]) - max_grids
    if left_out > 0:
        lines.append(f"  {GAP} and {left_out} more")
    return "\n".join(lines)


def _holders(spec: ShardingSpec) -> np.ndarray:
    """The devices of each piece: one dimension per array dimension, then the copies."""
    devices = np.arange(spec.num_shards).reshape(spec.mesh_shape)
    mesh_dim_of = {
        entry.axis: mesh_dim
        for mesh_dim, entry in enumerate(spec.mesh_mapping)
        if isinstance(entry, ShardedAxis)
    }
    sharded = [mesh_dim_of[axis] for axis in range(len(mesh_dim_of))]
    copies = [dim for dim in range(devices.ndim) if dim not in sharded]
    return devices.transpose(sharded + copies).reshape(*spec.tile_counts, -1)


def _labels(entry: object, size: int, pieces: int) -> list[str]:
    """What each piece of a dimension is called: an index or a slice."""
    if isinstance(entry, Unstacked):
        return [str(index) for index in range(pieces)]
    step = size // pieces
    return [f"{index * step}:{(index + 1) * step}" for index in range(pieces)]


def _shown(pieces: int, most: int) -> list[int | None]:
    """Which pieces to draw; None stands for those left out before the last one."""
    if pieces <= most:
        return list(range(pieces))
    return [*range(most - 2), None, pieces - 1]


def _ranges(numbers: np.ndarray) -> str:
    """Writes `[0, 1, 2, 5]` as `0-2,5`, and the middle of a long list as dots."""
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


def _grid(
    holders: np.ndarray,
    row_labels: list[str],
    column_labels: list[str],
    max_pieces: int,
) -> list[str]:
    """Lays pieces out in boxes, with a label left of each row and above each column."""
    rows = _shown(len(row_labels), max_pieces)
    columns = _shown(len(column_labels), max_pieces)
    left = [GAP if row is None else row_labels[row] for row in rows]
    top = [GAP if column is None else column_labels[column] for column in columns]
    cells = [
        [
            GAP if row is None or column is None else _ranges(holders[row, column])
            for column in columns
        ]
        for row in rows
    ]
    width = max(map(len, [*itertools.chain(*cells), *top]))
    margin = 4 + max(map(len, left))
    rule = " " * (margin + 1) + "+" + ("-" * (width + 2) + "+") * len(columns)
    lines = []
    if any(top):
        heads = " ".join(f" {label:^{width}} " for label in top)
        lines.append(" " * (margin + 2) + heads.rstrip())
    lines.append(rule)
    for label, row_cells in zip(left, cells, strict=True):
        boxes = "".join(f" {cell:^{width}} |" for cell in row_cells)
        lines += [f"{label:>{margin}} |{boxes}", rule]
    return lines
