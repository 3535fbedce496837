"""Documents as HTML: a page for a browser, or an element for a notebook.

A page needs no other file or network, and has no script. It follows the
reader's light or dark scheme, and fits a phone.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from shardmap.explaining.draw import sections
from shardmap.explaining.draw.document import (
    Block,
    Card,
    Code,
    Details,
    Document,
    Inline,
    Paragraph,
    Preformatted,
    Table,
    paragraph,
)
from shardmap.explaining.draw.grids import GAP, Drawing, Grid, Grids
from shardmap.explaining.draw.style import CLASS, COLOURS, CSS
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


def html_of(value: Any, shape: tuple[int, ...] | None = None) -> str:
    """A spec, perhaps with a shape, a picture or a plan, as one element."""
    if isinstance(value, ShardingSpec):
        return element(sections.of_spec(value, shape))
    if isinstance(value, Drawing):
        return element(Document("", "", (paragraph(value.grids().header), value)))
    text: str = value.explain()._repr_html_()
    return text


def _content(document: Document) -> str:
    title, lead = escape(document.title), escape(document.lead)
    header = f"<header>\n<h1>{title}</h1>\n<p>{lead}</p>\n</header>\n" if title else ""
    rest = "\n".join(
        f"<section>\n<h2>{escape(each.title)}</h2>\n{_blocks(each.blocks)}\n</section>"
        for each in document.sections
        if each.blocks
    )
    return f"{header}{_blocks(document.blocks)}\n{rest}"


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
        case Card(title, blocks, depth):
            # A phone has no room for more levels.
            indent = f' style="margin-left:{min(depth, 5)}em"' if depth else ""
            heading = f"<h3>{_inline(title)}</h3>"
            return f'<div class="card"{indent}>{heading}{_blocks(blocks)}</div>'
        case Details(title, blocks):
            summary = f"<summary>{escape(title)}</summary>"
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
    grids = drawing.grids()
    if grids.is_whole:
        return _copies(grids)
    tables = "".join(_grid(grid, grids) for grid in grids.grids)
    more = f"{GAP} and {grids.left_out:,} more" if grids.left_out else ""
    caption = "; ".join(filter(None, (more, grids.ways)))
    return f'{_scrolling(tables)}<p class="quiet">{escape(caption)}</p>'


def _copies(grids: Grids) -> str:
    """One box for a whole array, with the number of copies."""
    [[cell]] = grids.grids[0].cells
    said = f"whole on device{'s' * (grids.copies > 1)} {cell.holders}"
    box = f'<span class="copies">x {grids.copies:,}</span>'
    return f'<p class="quiet">{box} {said}</p>'


def _grid(grid: Grid, grids: Grids) -> str:
    caption = f"<caption>{escape(grid.place)}</caption>" if grid.place else ""
    label = escape(f"{grids.header} {grid.place}".rstrip())
    columns = "".join(f'<th scope="col">{_narrow(each)}</th>' for each in grid.columns)
    head = f"<thead><tr><td></td>{columns}</tr></thead>" if any(grid.columns) else ""
    rows = []
    for row, cells in zip(grid.rows, grid.cells, strict=True):
        boxes = "".join(
            f"<td>{cell.holders}</td>"
            if cell.number is None
            else f'<td class="{_class(cell.number, grids)}">'
            f"{_narrow(cell.holders, ',')}</td>"
            for cell in cells
        )
        rows.append(f'<tr><th scope="row">{_narrow(row)}</th>{boxes}</tr>')
    body = f"<tbody>{''.join(rows)}</tbody>"
    return f'<table class="grid" aria-label="{label}">{caption}{head}{body}</table>'


def _class(number: int, grids: Grids) -> str:
    """The colour of a shard; a device of a mesh has none."""
    return "device" if grids.is_mesh else f"shard tint{number % COLOURS}"


def _narrow(text: str, after: str = ":") -> str:
    """The text with optional line breaks for narrow columns."""
    return escape(text).replace(after, f"{after}<wbr>")
