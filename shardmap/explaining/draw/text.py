"""Documents, and pictures of how arrays are sharded, as text for a terminal.

`html` has them as pages. It is imported where it is used, as text does not need it.
"""

import html
import pathlib
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from shardmap.explaining.draw.document import (
    Block,
    Document,
    Group,
    Paragraph,
    Preformatted,
    Table,
)
from shardmap.explaining.draw.grids import Drawing, Grid, drawing_of_spec
from shardmap.sharding.conversions import sharding_of
from shardmap.sharding.spec import ShardingSpec, spec_of
from shardmap.units import printable, shown

NARROWEST = 40


def picture(
    value: Any,
    shape: Sequence[int] | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
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
      mesh: the mesh whose axes a `PartitionSpec` names.

    Returns:
      The picture as text, without a newline at the end. A notebook shows it as tables.
      Each box is a shard. The numbers in it are the ids of the devices that hold it; of
      a spec, 0, 1, 2 and so on, row-major over its mesh.

    Raises:
      TypeError: `value` is nothing that lies on devices, or has no shape.
      ValueError: the shape does not fit.

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
    >>> print(picture(ShardingSpec((), (Replicated(4),)), ()))
    () on 4 devices, all of it on each
         +----------------------+
         | whole on devices 0-3 |
         +----------------------+
    >>> print(picture({"w": jax.numpy.ones((4, 2)), "b": jax.numpy.ones(2)}))
    ['b']  (2,) on 1 device, all of it on each
    ['w']  (4, 2) on 1 device, all of it on each
    """
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
        return _drawn(_drawing(value, tuple(shape)))
    if shape is not None or mesh is not None:
        raise TypeError(
            "picture takes shape and mesh with a ShardingSpec, a Sharding or a "
            f"PartitionSpec, which comes first: got {shown(value)} there"
        )
    leaves = jax.tree_util.tree_leaves_with_path(value)
    drawings = {
        jax.tree_util.keystr(path): _drawing_of_leaf(path, leaf)
        for path, leaf in leaves
    }
    if list(drawings) == [""]:
        return _drawn(drawings[""])
    width = max(map(len, drawings), default=0)
    lines = [f"{path:<{width}}  {_head(each)}" for path, each in drawings.items()]
    return Picture("\n".join(lines))


def _drawing_of_leaf(path: Any, leaf: Any) -> Drawing:
    try:
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return _drawing(sharding_of(leaf), leaf.shape)
        array = np.asarray(leaf)
        if array.dtype.kind in "OSU":
            raise TypeError(f"it is {shown(leaf)}")
        return drawing_of_spec(spec_of(array), array.shape)
    except TypeError as error:
        raise TypeError(
            "picture draws an array, a tree of arrays, or a spec or sharding with a "
            f"shape; argument value{jax.tree_util.keystr(path)}: {error}"
        ) from error


def _drawing(layout: ShardingSpec | Sharding, shape: tuple[int, ...]) -> Drawing:
    if isinstance(layout, ShardingSpec):
        return drawing_of_spec(layout, shape)
    is_abstract = isinstance(getattr(layout, "mesh", None), AbstractMesh)
    places: Any = {} if is_abstract else layout.devices_indices_map(shape)
    spec = ShardingSpec.from_sharding(layout, shape)
    return drawing_of_spec(spec, shape, [device.id for device in places])


def _drawn(drawing: Drawing) -> "Picture":
    picture = Picture("\n".join([_head(drawing), *_boxes(drawing)]))
    picture.drawing = drawing
    return picture


def _head(drawing: Drawing) -> str:
    return ": ".join(filter(None, (drawing.header, drawing.ways)))


class Picture(str):
    """A picture in text, which a notebook shows as tables, and lines as they are."""

    drawing: Drawing | None = None

    def _repr_html_(self) -> str:
        from shardmap.explaining.draw.html import element

        if self.drawing is None:
            return f"<pre>{html.escape(self)}</pre>"
        header = Paragraph((self.drawing.header,))
        return element(Document("", "", (header, self.drawing)))


def _boxes(drawing: Drawing, most: int = 8, most_grids: int = 4) -> Iterator[str]:
    grids, more = drawing.grids(most, most_grids)
    is_copied = not drawing.cut and drawing.copies > 1
    for grid in grids:
        if grid.place:
            yield f"  {grid.place}"
        yield from _lines_of_grid(grid, "whole on devices " if is_copied else "")
    if more:
        yield f"  {more}"


def _lines_of_grid(grid: Grid, whole: str) -> list[str]:
    """Lays shards out in boxes, with a label left of each row and above each column."""
    texts = [[f"{whole}{cell}" for cell in row] for row in grid.cells]
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
    """The document as text that fits the terminal, without a newline at its end."""
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    head = _wrapped(f"{document.title}: {document.lead}", 0, width)
    return "\n".join([*head, *_lines(document.blocks, 2, width)])


def _wrapped(text: str, indent: int, width: int) -> list[str]:
    """A paragraph, with a hanging indent."""
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_on_hyphens=False,
    )


def _lines(blocks: Iterable[Block], indent: int, width: int) -> Iterator[str]:
    for block in blocks:
        match block:
            case Paragraph(parts, "warning"):
                yield from _wrapped("! " + "".join(parts), indent - 2, width)
            case Paragraph(parts):
                yield from _wrapped("".join(parts), indent, width)
            case Preformatted(lines):
                for line in lines:
                    text = line.lstrip()
                    yield from _wrapped(text, indent + len(line) - len(text), width)
            case Table():
                yield from _table(block, indent, width)
            case Drawing():
                yield from _fitting(block, indent, width)
            case Group(title, inner, "section") if inner:
                yield from ("", *_wrapped("".join(title), 0, width))
                yield from _lines(inner, indent, width)
            case Group(title, inner, "card", depth):
                yield from _wrapped("".join(title), indent + 2 * depth, width)
                yield from _lines(inner, indent + 2 * depth + 4, width)
            case Group(title, _, "fold"):
                yield from _wrapped("".join(title), indent, width)


def _table(table: Table, indent: int, width: int) -> Iterator[str]:
    """Columns, or a paragraph for each row if they are too wide."""
    rows = [[printable(cell) for cell in row.cells] for row in table.rows]
    lengths = [
        max(map(len, column)) for column in zip(table.titles, *rows, strict=True)
    ]
    has_room = indent + sum(lengths) + 2 * (len(lengths) - 1) <= width

    def line(cells: Sequence[str]) -> str:
        padded = [text.rjust(n) for text, n in zip(cells, lengths, strict=True)]
        padded[0] = cells[0].ljust(lengths[0])
        return " " * indent + "  ".join(padded).rstrip()

    if has_room and any(table.titles):
        yield line(table.titles)
    for row, cells in zip(table.rows, rows, strict=True):
        if has_room:
            yield line(cells)
        else:
            named = zip(table.titles, cells, strict=True)
            texts = [f"{title} {cell}".strip() for title, cell in named]
            yield from _wrapped(", ".join(texts), indent, width)
        yield from _lines(row.notes, indent + 4, width)


def _fitting(drawing: Drawing, indent: int, width: int) -> list[str]:
    """The widest picture that fits; none of a whole array."""
    if not drawing.cut:
        return []
    ways = _wrapped(drawing.ways, indent, width) if len(drawing.cut) > 1 else []
    for most in (8, 6, 4, 3):
        boxes = [" " * (indent - 4) + line for line in _boxes(drawing, most, 2)]
        if max(map(len, boxes)) <= width:
            return [*ways, *boxes]
    return []


class Printed:
    """A document that prints; a notebook shows it as a page."""

    def _document(self) -> Document:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self._document())

    def _repr_html_(self) -> str:
        from shardmap.explaining.draw.html import element

        return element(self._document())

    def save(self, path: str | pathlib.Path) -> None:
        """Writes it as one HTML page, which needs no network.

        Args:
          path: the file to write.
        """
        from shardmap.explaining.draw.html import page

        pathlib.Path(path).write_text(page(self._document()), encoding="utf-8")
