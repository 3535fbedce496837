"""Documents: the content of an explanation, rendered as text or as HTML.

A document is made once from a report. `as_text` and `as_html` render it, and they alone
know about indentation, tags and escapes.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from shardmap.explaining.draw.grids import Drawing

Style = Literal["", "quiet", "warning"]


class Code(str):
    """Program text: a name, a type, a line."""


Inline = tuple[str, ...]
"""Text in a line, in parts; those that are `Code` have its font on a page."""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Some sentences."""

    parts: Inline
    style: Style = ""


@dataclasses.dataclass(frozen=True)
class Preformatted:
    """Lines with their own indentation."""

    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, with notes below it."""

    cells: tuple[str, ...]
    notes: tuple[Paragraph, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows and columns.

    Attributes:
      titles: the titles of the columns; all "" for a table without a header.
      rows: the rows, with one cell for each column.
    """

    titles: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Card:
    """A block with a title, such as an axis or an array."""

    title: Inline
    blocks: tuple["Block", ...] = ()
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Details:
    """Blocks that a page folds; text shows the title and perhaps a line for them."""

    title: str
    blocks: tuple["Block", ...]
    line: str = ""


Block = Paragraph | Preformatted | Table | Drawing | Card | Details


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """A title, a summary and sections.

    Attributes:
      title: the name of the explained function; "" for none.
      lead: one line that says where it runs.
      blocks: the summary.
      sections: the sections; those without a block are left out.
    """

    title: str
    lead: str
    blocks: tuple[Block, ...]
    sections: tuple[Section, ...] = ()


def paragraph(*parts: str, style: Style = "") -> Paragraph:
    return Paragraph(parts, style)


def folded(blocks: Iterable[Block], most: int, what: str) -> tuple[Block, ...]:
    """The first blocks, and a fold with the others if there are several.

    >>> [type(each).__name__ for each in folded([paragraph("x")] * 9, 2, "axes")]
    ['Paragraph', 'Paragraph', 'Details']
    """
    all_blocks = tuple(blocks)
    first, rest = all_blocks[:most], all_blocks[most:]
    if len(rest) < 2:
        return all_blocks
    return (*first, Details(f"{len(rest):,} more {what}", rest))
