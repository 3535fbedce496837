"""Documents: the content of an explanation, which `text` and `html` print.

They alone know about indentation, tags and escapes.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from shardmap.explaining.draw.grids import Drawing


class Code(str):
    """Program text: a name, a type, a line."""


Inline = tuple[str, ...]
"""Text in a line, in parts; those that are `Code` have its font on a page."""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Some sentences."""

    parts: Inline
    style: Literal["", "quiet", "warning"] = ""


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
    """Rows, and the titles of their columns; all "" for a table without a header."""

    titles: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Blocks under a title.

    Attributes:
      title: the title.
      blocks: the blocks; a section without any is left out.
      kind: a section; a card, such as on an axis; what a page folds and of which text
        has only the title; or what only a page has, folded.
      depth: how far a card is indented.
    """

    title: Inline
    blocks: tuple["Block", ...]
    kind: Literal["section", "card", "fold", "page"]
    depth: int = 0


Block = Paragraph | Preformatted | Table | Drawing | Group


@dataclasses.dataclass(frozen=True)
class Document:
    """A title, which may be "", one line that says where it runs, and the rest."""

    title: str
    lead: str
    blocks: tuple[Block, ...]


def paragraph(*parts: str, style: Literal["", "quiet", "warning"] = "") -> Paragraph:
    return Paragraph(parts, style)


def section(title: str, blocks: Iterable[Block]) -> Group:
    return Group((title,), tuple(blocks), "section")


def folded(blocks: Iterable[Block], most: int, what: str) -> tuple[Block, ...]:
    """The first blocks, and a fold with the others if there are several.

    >>> [type(each).__name__ for each in folded([paragraph("x")] * 9, 2, "axes")]
    ['Paragraph', 'Paragraph', 'Group']
    """
    all_blocks = tuple(blocks)
    first, rest = all_blocks[:most], all_blocks[most:]
    if len(rest) < 2:
        return all_blocks
    return (*first, Group((f"{len(rest):,} more {what}",), rest, "fold"))
