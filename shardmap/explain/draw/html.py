"""An explanation as a page: for a browser, or for a notebook.

The page holds all that it needs: its style and its pictures. Nothing is fetched, and
no script runs. It follows the reader's light or dark scheme, and fits a phone.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardmap.explain.draw import groups, stages, svg
from shardmap.explain.draw.style import css, strong
from shardmap.explain.draw.tables import (
    ARRAY_COLUMNS,
    COLLECTIVE_COLUMNS,
    box,
    bytes_of,
    code,
    count_of,
    quantity,
    sentence,
    source,
    table,
    type_of,
)
from shardmap.explain.report import (
    ArrayLayout,
    Axis,
    Remark,
    Report,
)
from shardmap.units import duration, size

CLASS = "shardmap-report"
# An array beyond these has its line, and no picture: a page of a model's hundreds of
# parameters is to stay a page.
MOST_PICTURES = 24
# So many rows of a table are there at once; the others unfold.
MOST_ROWS = 6
# Says to the browser what is true anyway: nothing is fetched, and there is no script.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The explanation as a whole HTML document.

    >>> from shardmap.explain.report import Report
    >>> nothing = Report("f", (), 1, "cpu", (), (), (), None, None, (), ())
    >>> page(nothing).splitlines()[0]
    '<!DOCTYPE html>'
    """
    return document(f"{report.name} explained", _content(report))


def document(title: str, content: str) -> str:
    """A whole HTML document."""
    scope = strong(f".{CLASS}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>
{css(f".{CLASS}")}
html {{ color-scheme: light dark }}
body{scope} {{ margin: 0; max-width: none }}
{scope} main {{ max-width: 62rem; margin: 0 auto; padding: 1.6rem 1rem 3rem }}
</style>
</head>
<body class="{CLASS}">
<main>
{content}
</main>
</body>
</html>
"""


def fragment(report: Report) -> str:
    """The explanation as one element, to stand in another page.

    >>> from shardmap.explain.report import Report
    >>> nothing = Report("f", (), 1, "cpu", (), (), (), None, None, (), ())
    >>> fragment(nothing).splitlines()[0]
    '<div class="shardmap-report">'
    """
    return element(_content(report))


def element(content: str) -> str:
    """Some content as one element with its style, to stand in another page."""
    padded = f"div{strong(f'.{CLASS}')} {{ padding: 16px }}"
    return (
        f'<div class="{CLASS}">\n<style>\n{css(f".{CLASS}")}\n{padded}\n'
        f"</style>\n{content}\n</div>"
    )


def _content(report: Report) -> str:
    return "\n".join(
        [
            _header(report),
            _verdict(report),
            *_section("Worth a look", _folded(map(_remark, report.remarks[1:]), 4)),
            *_section("Mesh", _mesh(report)),
            *_section("Axes", _folded(map(_axis, report.axes), 5)),
            *_section("Arrays", _arrays(report.arrays)),
            *_section("In pieces", _pieces(report)),
            *_section("Between devices", _collectives(report)),
            *_section("Cost of a call, per device", _cost(report)),
            *_section("Notes", _notes(report.notes)),
        ]
    )


def _section(title: str, content: Iterator[str]) -> Iterator[str]:
    """A section, or nothing where there is no content."""
    parts = list(content)
    if parts:
        yield f"<section>\n<h2>{escape(title)}</h2>"
        yield from parts
        yield "</section>"


def _header(report: Report) -> str:
    devices = count_of(report.num_devices, "device")
    devices += f" ({report.device_kind or 'abstract'})"
    sizes = " x ".join(f"{name} {size:,}" for name, size in report.mesh)
    where = f"{devices}, mesh {sizes}" if sizes else devices
    return (
        f'<header>\n<h1>{code(report.name)}</h1>\n<p class="lead">'
        f"{escape(where)}</p>\n</header>"
    )


def _verdict(report: Report) -> str:
    items = "".join(f"<li>{escape(each)}</li>" for each in groups.verdict(report))
    return f'<ul class="verdict">{items}</ul>'


def _folded(parts: Iterable[str], most: int) -> Iterator[str]:
    """The first parts, and the others to unfold."""
    parts = list(parts)
    yield from parts[:most]
    if parts[most:]:
        title = f"{len(parts) - most:,} more"
        yield f"<details><summary>{title}</summary>{''.join(parts[most:])}</details>"


def _remark(remark: Remark) -> str:
    return (
        f'<div class="remark"><p>{sentence(remark.text)}</p>'
        f'<p class="advice">{escape(remark.advice)}</p>{source(remark.source)}</div>'
    )


def _mesh(report: Report) -> Iterator[str]:
    if report.mesh and report.num_devices > 1:
        drawn = svg.mesh(report.mesh, report.devices)
        yield box(drawn.picture, "the mesh")
        yield f'<p class="quiet">{escape(drawn.caption)}</p>'


def _axis(axis: Axis) -> str:
    name = "An axis" if axis.name is None else f"Axis {code(axis.name)}"
    count = "unknown size" if axis.size is None else f"{axis.size:,}"
    title = f'{name} of {count} <span class="quiet">{escape(axis.kind)}</span>'
    # Deeper than this there is no room on a phone.
    indent = min(axis.depth, 5)
    return (
        f'<div class="axis" style="margin-left:{indent * 0.9:.1f}em"><h3>{title}</h3>'
        f'<p class="layout">{escape(axis.layout)}</p><p>{sentence(axis.running)}</p>'
        f'<p class="quiet">{escape(axis.change)}</p>{source(axis.source)}</div>'
    )


def _arrays(arrays: Sequence[ArrayLayout]) -> Iterator[str]:
    if not arrays:
        return
    if len(arrays) <= groups.MOST_ARRAYS:
        cards = "".join(layout(*those) for those in groups.alike(arrays))
        yield f'<div class="arrays">{cards}</div>'
        return
    pictures = MOST_PICTURES
    for group in groups.groups_of_arrays(arrays):
        shown, rest = group.arrays[:pictures], group.arrays[pictures:]
        pictures -= len(shown)
        yield f"<details><summary>{escape(group.title)}</summary>"
        if shown:
            yield f'<div class="arrays">{"".join(map(layout, shown))}</div>'
        if rest:
            yield table(ARRAY_COLUMNS, rest, f"arrays of {group.prefix}")
        yield "</details>"


def layout(array: ArrayLayout, *others: ArrayLayout) -> str:
    """The card of an array, and of others that differ in nothing but their path."""
    whole = size(array.bytes) + (" each" if others else "")
    paths = ", ".join(code(each.path) for each in (array, *others))
    parts = [
        f"<h3>{paths}</h3>",
        f'<p class="quiet">{escape(array.role)}, {code(type_of(array))}, {whole}</p>',
        f"<p>{sentence(array.layout)}</p>",
    ]
    if array.shard_shape is not None and array.shard_bytes is not None:
        parts.append(
            f'<p class="quiet">On a device {code(array.shard_shape)}, '
            f"{size(array.shard_bytes)}</p>"
        )
    if array.spec is not None:
        if array.spec.num_shards > 1:
            drawn = svg.array(array.path, array.spec, array.shape, array.devices)
            parts.append(box(drawn.picture, f"shards of {array.path}"))
            if drawn.caption:
                parts.append(f'<p class="quiet">{escape(drawn.caption)}</p>')
        parts.append(f'<p class="quiet">{code(array.spec)}</p>')
    return f'<div class="array">{"".join(parts)}</div>'


def _pieces(report: Report) -> Iterator[str]:
    """The stages of a function in pieces, and what became of its cuts."""
    if report.pieces:
        yield stages.drawn(report.stages)
        text = "\n".join(report.pieces)
        pre = f'<pre class="code">{escape(text)}</pre>'
        yield f"<details><summary>Cuts</summary>{box(pre, 'cuts')}</details>"


def _collectives(report: Report) -> Iterator[str]:
    collectives = report.collectives
    if not collectives:
        yield "<p>Nothing moves between devices.</p>"
        return
    times = [each.seconds for each in collectives if each.seconds is not None]
    columns = [c for c in COLLECTIVE_COLUMNS if c.title != "Time" or times]
    rows = groups.groups_of_collectives(collectives)
    first = groups.most_sent(rows, MOST_ROWS)
    others = [row for row in rows if row not in first]
    yield table(columns, first, "collectives")
    if others:
        title = f"{len(others):,} more, which send less"
        rest = table(columns, others, "more collectives")
        yield f"<details><summary>{title}</summary>{rest}</details>"
    advice = dict.fromkeys(each for row in rows for each in row.advice)
    if advice:
        items = "".join(f"<li>{escape(each)}</li>" for each in advice)
        yield f"<p>What avoids those of the compiler:</p><ul>{items}</ul>"
    joined, together = report.interconnect, report.seconds
    if joined is not None and together:
        yield (
            f'<p class="quiet">Together about {duration(together)}, estimated for '
            f"{escape(joined.name)}: {joined.bandwidth / 1e9:,.4g} GB/s from a device, "
            f"{duration(joined.latency)} a message ({escape(joined.source)}).</p>"
        )


def _cost(report: Report) -> Iterator[str]:
    cost = report.cost
    if cost is None:
        return
    values = (
        ("Floating point operations", quantity(cost.flops)),
        ("Exponentials and the like", quantity(cost.transcendentals)),
        ("Bytes read and written", bytes_of(cost.bytes_accessed)),
        ("Operations per byte", quantity(cost.intensity)),
        ("Memory at its peak", bytes_of(cost.peak_bytes)),
    )
    rows = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in values)
    yield f"<dl>{''.join(rows)}</dl>"
    donated = (
        f" ({size(cost.donated_bytes)} of them in the place of donated arguments)"
        if cost.donated_bytes
        else ""
    )
    yield (
        f'<p class="quiet">In memory: arguments {bytes_of(cost.argument_bytes)}, '
        f"results {bytes_of(cost.output_bytes)}{donated}, temporary "
        f"{bytes_of(cost.temporary_bytes)}.</p>"
    )
    for held, count in groups.counted(report.largest):
        where = f" {code(held.source)}" if held.source else ""
        yield (
            f'<p class="quiet">{count}{size(held.bytes)}: {code(held.type)} of '
            f"{escape(held.operation)}{where}</p>"
        )


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        yield f'<ul class="quiet">{items}</ul>'
