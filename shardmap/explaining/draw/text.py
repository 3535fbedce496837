"""Documents, and pictures of how arrays are sharded, as text for a terminal.

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

import dataclasses
import html
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from shardmap.explaining.draw.document import (
    Block,
    Card,
    Details,
    Document,
    Paragraph,
    Preformatted,
    Table,
)
from shardmap.explaining.draw.grids import GAP, Drawing, Grid, Grids, drawing_of_spec
from shardmap.sharding.conversions import sharding_of
from shardmap.sharding.spec import ShardingSpec, spec_of
from shardmap.units import printable, shown

NARROWEST = 40
_BOLD, _WARNING, _FAINT, _PLAIN = "\033[1m", "\033[33m", "\033[2m", "\033[0m"
_STYLES = {"": "", "quiet": _FAINT, "warning": _WARNING}


def picture(
    value: Any,
    shape: Sequence[int] | None = None,
    devices: Sequence[int] = (),
    *,
    mesh: Mesh | AbstractMesh | None = None,
    max_pieces: int = 8,
    max_grids: int = 4,
) -> "Picture":
    """Draws which devices hold which shard of an array.

    The last two sharded dimensions are the rows and columns of a grid. A single one
    goes down, unless it is the last dimension of the array. If more are sharded, there
    is a grid for each shard of the others. Of a tree of arrays each leaf is one line,
    so that one that is replicated is seen. `jax.debug.visualize_array_sharding` draws
    arrays of up to two dimensions.

    Args:
      value: an array, or a tree of arrays; or, with the `shape` of an array, a
        `ShardingSpec`, a `jax.sharding.Sharding` or, with `mesh`, a `PartitionSpec`.
      shape: the shape of the array, of a spec or sharding.
      devices: the ids of the devices, in the order of the spec's mesh; () stands for
        those of the array or sharding, and for 0, 1, 2 and so on of a spec.
      mesh: the mesh whose axes a `PartitionSpec` names.
      max_pieces: how many shards of a dimension to draw; `...` stands for the others.
      max_grids: how many grids to draw.

    Returns:
      The picture as text, without a newline at the end. A notebook shows it as tables.

    Raises:
      TypeError: `value` is nothing that lies on devices, or has no shape.
      ValueError: the shape does not fit.

    >>> from shardmap import Replicated, ShardingSpec, Unstacked, ShardedAxis
    >>> print(picture(ShardingSpec((), (Replicated(4),)), ()))
    () on 4 devices, all of it on each
         +----------------------+
         | whole on devices 0-3 |
         +----------------------+
    >>> print(picture(ShardingSpec((Unstacked(3), None), (ShardedAxis(0),)), (3, 5)))
    (3, 5) on 3 devices, (5,) on each: dimension 0 down
          +---+
        0 | 0 |
        1 | 1 |
        2 | 2 |
          +---+
    >>> print(picture({"w": jax.numpy.ones((4, 2)), "b": jax.numpy.ones(2)}))
    ['b']  (2,) on 1 device, all of it on each
    ['w']  (4, 2) on 1 device, all of it on each
    """

    def drawing(
        spec: ShardingSpec, shape: tuple[int, ...], ids: tuple[int, ...]
    ) -> Any:
        return drawing_of_spec(spec, shape, ids, max_pieces, max_grids)

    if isinstance(value, PartitionSpec):
        if mesh is None:
            raise TypeError(
                f"picture of {value} needs the mesh whose axes it names: "
                f"picture({value}, shape, mesh=mesh)"
            )
        value = NamedSharding(mesh, value)
    if isinstance(value, ShardingSpec | Sharding):
        if shape is None:
            raise TypeError(
                f"picture of a {type(value).__name__} needs the shape of the array: "
                "picture(value, (8, 64))"
            )
        return _drawn(drawing(*_layout(value, tuple(shape), tuple(devices))))
    if shape is not None or mesh is not None:
        raise TypeError(
            "picture takes shape and mesh with a ShardingSpec, a Sharding or a "
            f"PartitionSpec, which comes first: got {shown(value)} there"
        )
    leaves = jax.tree_util.tree_leaves_with_path(value)
    drawings = {
        jax.tree_util.keystr(path): drawing(*_lies(path, leaf, tuple(devices)))
        for path, leaf in leaves
    }
    if list(drawings) == [""]:
        return _drawn(drawings[""])
    width = max(map(len, drawings), default=0)
    lines = [
        f"{path:<{width}}  {_head(each.grids())}" for path, each in drawings.items()
    ]
    return Picture("\n".join(lines))


def _lies(path: Any, leaf: Any, devices: tuple[int, ...]) -> Any:
    """The spec, the shape and the devices of an array of a tree."""
    try:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            array = np.asarray(leaf)
            if array.dtype.kind in "OSU":
                raise TypeError(f"it is {shown(leaf)}")
            return spec_of(array), array.shape, devices
        return _layout(sharding_of(leaf), leaf.shape, devices)
    except TypeError as error:
        raise TypeError(
            "picture draws an array, a tree of arrays, or a spec or sharding with a "
            f"shape; argument value{jax.tree_util.keystr(path)}: {error}"
        ) from error


def _layout(
    layout: ShardingSpec | Sharding, shape: tuple[int, ...], devices: tuple[int, ...]
) -> tuple[ShardingSpec, tuple[int, ...], tuple[int, ...]]:
    if isinstance(layout, ShardingSpec):
        return layout, shape, devices
    spec = ShardingSpec.from_sharding(layout, shape)
    is_abstract = isinstance(getattr(layout, "mesh", None), AbstractMesh)
    if not devices and not is_abstract:
        places: Any = layout.devices_indices_map(shape)
        devices = tuple(device.id for device in places)
    return spec, shape, devices


def _drawn(drawing: Drawing) -> "Picture":
    grids = drawing.grids()
    picture = Picture("\n".join([_head(grids), *_lines(grids)]))
    picture.drawing = drawing
    return picture


def _head(grids: Grids) -> str:
    return f"{grids.header}: {grids.ways}" if grids.ways else grids.header


class Picture(str):
    """A picture in text, which a notebook shows as tables, and lines as they are."""

    drawing: Drawing | None = None

    def _repr_html_(self) -> str:
        from shardmap.explaining.draw.html import html_of

        if self.drawing is None:
            return f"<pre>{html.escape(self)}</pre>"
        return html_of(self.drawing)


def _lines(grids: Grids) -> list[str]:
    lines = []
    for grid in grids.grids:
        if grid.place:
            lines.append(f"  {grid.place}")
        lines += _boxes(grid, grids.is_whole and grids.copies > 1)
    if grids.left_out:
        lines.append(f"  {GAP} and {grids.left_out:,} more")
    return lines


def _boxes(grid: Grid, is_copied: bool) -> list[str]:
    """Lays shards out in boxes, with a label left of each row and above each column."""
    whole = "whole on devices " if is_copied else ""
    texts = [[f"{whole}{cell.holders}" for cell in row] for row in grid.cells]
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
    # A single column needs no lines between rows.
    return lines if any(grid.columns) else [*lines, rule]


def as_text(document: Document) -> str:
    """The document as text that fits the terminal, without a newline at its end.

    It has colours if standard output is a terminal and the environment does not have
    ``NO_COLOR``.
    """
    width = shutil.get_terminal_size().columns
    colour = _is_terminal() and not os.environ.get("NO_COLOR")
    writer = _Writer(max(width, NARROWEST), colour)
    writer.add(f"{document.title}: {document.lead}", style=_BOLD)
    writer.blocks(document.blocks, 2)
    for section in document.sections:
        if section.blocks:
            writer.lines.append("")
            writer.add(section.title, style=_BOLD)
            writer.blocks(section.blocks, 2)
    return "\n".join(writer.lines)


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (
        AttributeError,
        ValueError,
    ):  # It is missing or closed.
        return False


class _Writer:
    """Collects lines that fit the width."""

    def __init__(self, width: int, colour: bool) -> None:
        self.width, self.colour = width, colour
        self.lines: list[str] = []

    def add(self, text: str, indent: int = 0, style: str = "") -> None:
        """Adds a paragraph, with a hanging indent."""
        for line in textwrap.wrap(
            printable(text),
            self.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 2),
            break_on_hyphens=False,
        ):
            self.line(line, style)

    def line(self, line: str, style: str = "") -> None:
        """Adds a line as it is."""
        self.lines.append(f"{style}{line}{_PLAIN}" if style and self.colour else line)

    def blocks(self, blocks: Iterable[Block], indent: int) -> None:
        for block in blocks:
            self.block(block, indent)

    def block(self, block: Block, indent: int) -> None:
        match block:
            case Paragraph(parts, "warning"):
                self.add("! " + "".join(parts), indent - 2, _WARNING)
            case Paragraph(parts, style):
                self.add("".join(parts), indent, _STYLES[style])
            case Preformatted(lines):
                for line in lines:
                    text = line.lstrip()
                    self.add(text, indent + len(line) - len(text))
            case Table():
                self.table(block, indent)
            case Drawing():
                self.drawing(block, indent)
            case Card(title, inner, depth):
                indent += 2 * depth
                self.add("".join(title), indent)
                self.blocks(inner, indent + 4)
            case Details(title, _, line):
                self.add(title, indent)
                self.add(line, indent + 4, _FAINT)

    def table(self, table: Table, indent: int) -> None:
        """Adds columns, or a paragraph for each row if they are too wide."""
        rows = [[printable(cell) for cell in row.cells] for row in table.rows]
        lengths = [
            max(map(len, column)) for column in zip(table.titles, *rows, strict=True)
        ]
        has_room = indent + sum(lengths) + 2 * (len(lengths) - 1) <= self.width

        def line(cells: Sequence[str]) -> str:
            padded = [text.rjust(n) for text, n in zip(cells, lengths, strict=True)]
            padded[0] = cells[0].ljust(lengths[0])
            return " " * indent + "  ".join(padded).rstrip()

        if has_room and any(table.titles):
            self.line(line(table.titles), _FAINT)
        for row, cells in zip(table.rows, rows, strict=True):
            if has_room:
                self.line(line(cells))
            else:
                named = zip(table.titles, cells, strict=True)
                texts = [f"{title} {cell}".strip() for title, cell in named]
                self.add(", ".join(texts), indent)
            self.blocks(row.notes, indent + 4)

    def drawing(self, drawing: Drawing, indent: int) -> None:
        """Adds the widest picture that fits; none of a whole array or of a mesh."""
        for most in (8, 6, 4, 3):
            fewer = dataclasses.replace(drawing, max_pieces=most, max_grids=2)
            grids = fewer.grids()
            lines = [f"{' ' * (indent - 4)}{line}".rstrip() for line in _lines(grids)]
            if max(map(len, lines)) <= self.width:
                break
        else:
            return
        if not grids.is_whole and not grids.is_mesh:
            if grids.down is not None and grids.across is not None:
                self.add(grids.ways, indent, _FAINT)
            self.lines += lines
