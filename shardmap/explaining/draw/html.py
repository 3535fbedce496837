"""Documents as HTML: a page for a browser, or an element for a notebook.

A page needs no other file or network, and has no script. It follows the
reader's light or dark scheme, and fits a phone.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from html import escape

from shardmap.explaining.draw.document import (
    Block,
    Code,
    Document,
    Group,
    Inline,
    Paragraph,
    Preformatted,
    Table,
    paragraph,
)
from shardmap.explaining.draw.grids import GAP, Drawing, Grid, drawing_of_spec
from shardmap.explaining.draw.style import CLASS, COLOURS, CSS
from shardmap.explaining.report import describe
from shardmap.sharding.spec import ShardingSpec

# Tells the browser to fetch nothing and to run no script. A page needs neither.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(document: Document) -> str:
    """The document as a whole page.

    >>> page(Document("f", "1 cpu device", ())).splitlines()[0]
    '<!DOCTYPE html>'
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(document.title)} explained</title>
<style>
{CSS}
html {{ color-scheme: light dark }}
</style>
</head>
<body class="{CLASS} page">
<main>
{_content(document)}
</main>
</body>
</html>
"""


def element(document: Document) -> str:
    """The document as one element with its style, for use in another page.

    >>> element(Document("f", "1 cpu device", ())).splitlines()[0]
    '<div class="shardmap-report">'
    """
    style = f"<style>\n{CSS}\n</style>"
    return f'<div class="{CLASS}">\n{style}\n{_content(document)}\n</div>'


def of_spec(spec: ShardingSpec) -> str:
    """A spec as one element. It has no shape, so that shards have numbers."""
    drawing = drawing_of_spec(spec, spec.tile_counts)
    labels = [list(map(str, range(count))) for count in spec.tile_counts]
    drawing = dataclasses.replace(drawing, labels=labels)
    said = paragraph(f"{describe(spec).capitalize()}.")
    return element(Document("", "", (paragraph(Code(spec)), said, drawing)))


def _content(document: Document) -> str:
    title, lead = escape(document.title), escape(document.lead)
    header = f"<header>\n<h1>{title}</h1>\n<p>{lead}</p>\n</header>\n" if title else ""
    return header + _blocks(document.blocks)


def _blocks(blocks: Iterable[Block]) -> str:
    return "\n".join(map(_block, blocks))


def _block(block: Block) -> str:
    match block:
        case Paragraph(parts, style):
            kind = f' class="{style}"' if style else ""
            return f"<p{kind}>{_inline(parts)}</p>"
        case Preformatted(lines):
            return f"<pre>{escape(chr(10).join(lines))}</pre>"
        case Table():
            return _table(block)
        case Drawing():
            return _drawing(block)
        case Group(title, blocks, "section"):
            heading = f"<h2>{_inline(title)}</h2>"
            return f"<section>{heading}{_blocks(blocks)}</section>" if blocks else ""
        case Group(title, blocks, "card", depth):
            # A phone has no room for more levels.
            indent = f' style="margin-left:{min(depth, 5)}em"' if depth else ""
            heading = f"<h3>{_inline(title)}</h3>"
            return f'<div class="card"{indent}>{heading}{_blocks(blocks)}</div>'
        case Group(title, blocks):
            summary = f"<summary>{_inline(title)}</summary>"
            return f"<details>{summary}{_blocks(blocks)}</details>"


def _inline(parts: Inline) -> str:
    return "".join(
        f"<code>{escape(part)}</code>" if isinstance(part, Code) else escape(part)
        for part in parts
    )


def _table(table: Table) -> str:
    """A table; with titles it is a list of rows on a phone."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.titles)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.titles) else ""
    rows = []
    for row in table.rows:
        cells = "".join(
            f'<td data-label="{escape(title)}"><span>{_inline((cell,))}</span></td>'
            for title, cell in zip(table.titles, row.cells, strict=True)
        )
        rows.append(f"<tr>{cells}</tr>")
        if row.notes:
            notes = f'<td colspan="{len(row.cells)}">{_blocks(row.notes)}</td>'
            rows.append(f'<tr class="notes">{notes}</tr>')
    body = "\n".join(rows)
    kind = "rows titled" if head else "rows"
    return _scrolling(f'<table class="{kind}">{head}<tbody>\n{body}\n</tbody></table>')


def _scrolling(content: str) -> str:
    """Lets a wide element scroll by itself, also by keyboard."""
    return f'<div class="scrolling" tabindex="0" role="group">{content}</div>'


def _drawing(drawing: Drawing) -> str:
    grids, more = drawing.grids()
    if not drawing.cut:  # One box, with the number of copies.
        [[cell]] = grids[0].cells
        said = f"whole on device{'s' * (drawing.copies > 1)} {cell}"
        box = f'<span class="copies">x {drawing.copies:,}</span>'
        return f'<p class="quiet">{box} {said}</p>'
    tints = itertools.cycle(range(COLOURS))
    tables = "".join(_grid(grid, drawing.header, tints) for grid in grids)
    caption = "; ".join(filter(None, (more, drawing.ways)))
    return f'{_scrolling(tables)}<p class="quiet">{escape(caption)}</p>'


def _grid(grid: Grid, header: str, tints: Iterator[int]) -> str:
    caption = f"<caption>{escape(grid.place)}</caption>" if grid.place else ""
    label = escape(f"{header} {grid.place}".rstrip())
    columns = "".join(f'<th scope="col">{_narrow(each)}</th>' for each in grid.columns)
    head = f"<thead><tr><td></td>{columns}</tr></thead>" if any(grid.columns) else ""
    rows = []
    for row, cells in zip(grid.rows, grid.cells, strict=True):
        boxes = "".join(
            f"<td>{GAP}</td>"
            if cell == GAP
            else f'<td class="shard" style="background:var(--tint{next(tints)})">'
            f"{_narrow(cell, ',')}</td>"
            for cell in cells
        )
        rows.append(f'<tr><th scope="row">{_narrow(row)}</th>{boxes}</tr>')
    body = f"<tbody>{''.join(rows)}</tbody>"
    return f'<table class="grid" aria-label="{label}">{caption}{head}{body}</table>'


def _narrow(text: str, after: str = ":") -> str:
    """The text with optional line breaks for narrow columns."""
    return escape(text).replace(after, f"{after}<wbr>")
