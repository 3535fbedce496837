"""Pictures of meshes and of arrays on devices, as SVG.

A box is a shard, and the numbers in it are the devices that hold it. It is as high and
as wide as the shard is, as far as its numbers leave room for that. A device has the
same colour in all pictures, and a shard with copies the colours of several. They
repeat, and everything that they say is written too. The colours themselves are in the
style of the page, so that they follow its light or dark scheme.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from shardmap.explain.draw.grids import GAP, Grid, Grids, grids_of
from shardmap.sharding.spec import ShardedAxis, ShardingSpec, Unstacked

COLOURS = 8
# How many shards of a dimension to draw: as many as fit on a phone.
MOST_SHARDS = (8, 6, 5, 4, 3)
MAX_GRIDS = 4
WIDTH = 272
# How high the boxes of a grid are together, but for those that numbers make higher.
HEIGHT = 224

# In the units of the page's pixels; the letters are those of a monospaced font.
LETTER = 7.5
LINE = 18
PADDING = 8
LEAST_BOX, LEAST_HEIGHT = 30, 24
GAP_BETWEEN = 4


class Drawing(NamedTuple):
    """An SVG element, and in words which way is which; "" if there is one box."""

    picture: str
    caption: str


def array(
    name: str, spec: ShardingSpec, shape: Sequence[int], devices: Sequence[int] = ()
) -> Drawing:
    """The shards of an array.

    Args:
      name: what to call the array in the text for readers who cannot see it.
      spec: how the array is cut.
      shape: the array's shape.
      devices: the numbers of the devices, in the order of the spec's mesh; () stands
        for 0, 1, 2 and so on.

    >>> from shardmap.sharding.spec import Chunked, Replicated
    >>> spec = ShardingSpec((None, Chunked(3)), (ShardedAxis(0), Replicated(2)))
    >>> array("x", spec, (4, 6)).caption
    'dimension 1 across'
    """
    found = _fitting(spec, shape, devices)
    return Drawing(_picture(f"{name}: {found.header}", found), found.ways)


def mesh(axes: Sequence[tuple[str, int]], devices: Sequence[int] = ()) -> Drawing:
    """The devices of a mesh, each in its place.

    Args:
      axes: the names and sizes of the axes, major to minor.
      devices: their numbers, in that order; () stands for 0, 1, 2 and so on.

    >>> mesh([("data", 4), ("model", 2)]).caption
    'data 4 down, model 2 across'
    """
    sizes = [size for _, size in axes]
    spec = ShardingSpec(map(Unstacked, sizes), map(ShardedAxis, range(len(sizes))))
    # Of a mesh there is nothing to scale.
    found = _fitting(spec, sizes, devices)._replace(size=(None, None))
    ways = {found.down: " down", found.across: " across"}
    parts = [
        f"{name} {size:,}{ways.get(number, '')}"
        for number, (name, size) in enumerate(axes)
    ]
    caption = ", ".join(parts)
    return Drawing(_picture(f"mesh: {caption}", found), caption)


def _fitting(spec: ShardingSpec, shape: Sequence[int], devices: Sequence[int]) -> Grids:
    """As many shards as have room, or as few as still make sense."""
    for most in MOST_SHARDS:
        found = grids_of(spec, shape, devices, max_pieces=most, max_grids=MAX_GRIDS)
        if all(_grid(grid, 0, (None, None))[1] <= WIDTH for grid in found.grids):
            break
    return found


def _picture(title: str, found: Grids) -> str:
    parts: list[str] = []
    top, width = 0.0, 0.0
    for grid in found.grids:
        drawn, grid_width, height = _grid(grid, top, found.size)
        parts += drawn
        width = max(width, grid_width)
        top += height + 3 * GAP_BETWEEN
    top -= 2 * GAP_BETWEEN
    if found.left_out:
        more = f"{GAP} and {found.left_out:,} more"
        parts.append(_text(0, top + LINE / 2, more, "label start"))
        width = max(width, len(more) * LETTER)
        top += LINE
    width, top = width + 2, top + 2  # The lines around boxes are half outside them.
    spoken = escape(f"{title}. {' '.join(_spoken(found))}")
    return (
        f'<svg class="picture" role="img" aria-label="{spoken}" '
        f'width="{width:.0f}" height="{top:.0f}" viewBox="-1 -1 {width:.0f} {top:.0f}">'
        f"<title>{spoken}</title>{''.join(parts)}</svg>"
    )


def _box(
    grid: Grid, room: float, size: tuple[int | None, int | None]
) -> tuple[float, float]:
    """How wide and high each box is: to scale, but with room for what is in it."""
    texts = [cell.holders for row in grid.cells for cell in row] + grid.columns
    least = max(LEAST_BOX, max(map(len, texts)) * LETTER + 2 * PADDING)
    down, across = size
    if not down or not across:
        return least, LEAST_BOX
    scale = min(HEIGHT / down, room / across)
    return (
        max(least, scale * across / len(grid.columns) - GAP_BETWEEN),
        max(LEAST_HEIGHT, scale * down / len(grid.rows) - GAP_BETWEEN),
    )


def _grid(
    grid: Grid, top: float, size: tuple[int | None, int | None]
) -> tuple[list[str], float, float]:
    """One grid below `top`: its elements, its width and its height.

    Args:
      size: that of the array down and across, where it is drawn to scale.
    """
    parts = []
    left = max(map(len, grid.rows)) * LETTER
    left += PADDING if left else 0
    box, high = _box(grid, WIDTH - left, size)
    y = top
    if grid.place:
        parts.append(_text(0, y + LINE / 2, grid.place, "label start"))
        y += LINE
    if any(grid.columns):
        for number, column in enumerate(grid.columns):
            x = left + number * (box + GAP_BETWEEN) + box / 2
            parts.append(_text(x, y + LINE / 2, column, "label"))
        y += LINE
    for label, cells in zip(grid.rows, grid.cells, strict=True):
        middle = y + high / 2
        if label:
            parts.append(_text(left - PADDING, middle, label, "label end"))
        for number, cell in enumerate(cells):
            x = left + number * (box + GAP_BETWEEN)
            if not cell.devices:
                parts.append(_text(x + box / 2, middle, cell.holders, "label"))
                continue
            parts.append(
                f'<g class="shard">{_boxes(cell.devices, x, y, box, high)}'
                f"{_text(x + box / 2, middle, cell.holders, 'holders')}</g>"
            )
        y += high + GAP_BETWEEN
    across = left + len(grid.columns) * (box + GAP_BETWEEN) - GAP_BETWEEN
    return parts, max(across, len(grid.place) * LETTER), y - GAP_BETWEEN - top


def _boxes(
    devices: Sequence[int], x: float, y: float, width: float, height: float
) -> str:
    """A box, in the colours of the devices that hold it."""
    colours = list(dict.fromkeys(device % COLOURS for device in devices))
    first, *others = colours
    drawn = (
        f'<rect class="colour{first}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="4"/>'
    )
    part = width / len(colours)
    for place, colour in enumerate(others, 1):
        drawn += (
            f'<rect class="part colour{colour}" x="{x + place * part:.1f}" '
            f'y="{y:.1f}" width="{part:.1f}" height="{height:.1f}"/>'
        )
    return drawn


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _spoken(found: Grids) -> Iterator[str]:
    """What the boxes say, in words."""
    for grid in found.grids:
        for label, cells in zip(grid.rows, grid.cells, strict=True):
            for column, cell in zip(grid.columns, cells, strict=True):
                place = ", ".join(part for part in (grid.place, label, column) if part)
                if cell.devices:
                    holders = "device" + "s" * (not cell.holders.isdigit())
                    holders += f" {cell.holders}"
                    yield f"{place}: {holders}." if place else f"Held by {holders}."
    if found.left_out:
        yield f"And {found.left_out:,} more."
