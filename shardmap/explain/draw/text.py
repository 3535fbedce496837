"""A picture in text of how an array is sharded on devices.

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

Each box is one shard of the array. The numbers in it are the devices that hold it,
counted row-major over the mesh, so a box with several numbers is a shard with copies:

>>> print(picture(ShardingSpec((Chunked(2),), (ShardedAxis(0), Replicated(4))), (6,)))
(6,) on 8 devices, (3,) on each: dimension 0 across
       0:3   3:6
     +-----+-----+
     | 0-3 | 4-7 |
     +-----+-----+
"""

from collections.abc import Sequence

from shardmap.explain.draw.grids import GAP, Grid, grids_of
from shardmap.sharding.spec import ShardingSpec


def picture(
    spec: ShardingSpec,
    shape: Sequence[int],
    devices: Sequence[int] = (),
    *,
    max_pieces: int = 8,
    max_grids: int = 4,
) -> str:
    """Draws which devices hold which shard of an array.

    The last two cut dimensions make a grid, rows and columns; one alone goes down,
    unless it is the array's last. Where more are cut, there is one grid for each shard
    of the others.

    Args:
      spec: how the array is cut.
      shape: the array's shape.
      devices: the numbers of the devices, in the order of the spec's mesh; () stands
        for 0, 1, 2 and so on.
      max_pieces: how many shards of a dimension to draw; the others become `...`.
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
    (3, 5) on 3 devices, (5,) on each: dimension 0 down
          +---+
        0 | 0 |
        1 | 1 |
        2 | 2 |
          +---+
    """
    grids = grids_of(spec, shape, devices, max_pieces=max_pieces, max_grids=max_grids)
    lines = [grids.header]
    for grid in grids.grids:
        if grid.place:
            lines.append(f"  {grid.place}")
        lines += _boxes(grid)
    if grids.left_out:
        lines.append(f"  {GAP} and {grids.left_out} more")
    return "\n".join(lines)


def _boxes(grid: Grid) -> list[str]:
    """Lays shards out in boxes, with a label left of each row and above each column."""
    texts = [[cell.holders for cell in row] for row in grid.cells]
    width = max(len(text) for row in [*texts, grid.columns] for text in row)
    margin = 4 + max(map(len, grid.rows))
    rule = " " * (margin + 1) + "+" + ("-" * (width + 2) + "+") * len(grid.columns)
    lines = []
    if any(grid.columns):
        heads = " ".join(f" {label:^{width}} " for label in grid.columns)
        lines.append(" " * (margin + 2) + heads.rstrip())
    lines.append(rule)
    for label, row in zip(grid.rows, texts, strict=True):
        boxes = "".join(f" {text:^{width}} |" for text in row)
        lines.append(f"{label:>{margin}} |{boxes}")
        if any(grid.columns):
            lines.append(rule)
    # Rows alone need no lines between them.
    return lines if any(grid.columns) else [*lines, rule]
