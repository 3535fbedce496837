"""Tables and words of a page; a table becomes a list of rows on a phone."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from shardmap.explain.draw import groups
from shardmap.explain.report import ArrayLayout, Collective
from shardmap.units import duration, size

UNKNOWN = "unknown"


class _Column(NamedTuple):
    title: str
    value: Callable[..., str]
    is_number: bool = False


ARRAY_COLUMNS = (
    _Column("Array", lambda a: code(a.path)),
    _Column("Role", lambda a: escape(a.role)),
    _Column("Type", lambda a: code(type_of(a))),
    _Column("Layout", lambda a: escape(a.layout)),
    _Column("Bytes", lambda a: size(a.bytes), True),
    _Column("On a device", lambda a: bytes_of(a.shard_bytes), True),
)
COLLECTIVE_COLUMNS = (
    _Column("What", lambda c: _kind(c.first)),
    _Column("Over", lambda c: _over(c.first)),
    _Column("Devices", lambda c: _number(c.first.group_size), True),
    _Column("Times", lambda c: _number(c.times), True),
    _Column("In, each", lambda c: size(c.bytes_in), True),
    _Column("Out, each", lambda c: size(c.bytes_out), True),
    _Column("Sent, all", lambda c: bytes_of(c.link_bytes), True),
    _Column(
        "Time", lambda c: UNKNOWN if c.seconds is None else duration(c.seconds), True
    ),
    _Column("Where", lambda c: _where(c)),
)


def table(columns: Sequence[_Column], rows: Sequence[object], name: str) -> str:
    heads = "".join(
        f'<th scope="col"{_kind_of(column)}>{column.title}</th>' for column in columns
    )
    lines = "\n".join(f"<tr>{''.join(_cells(columns, row))}</tr>" for row in rows)
    return box(
        f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>",
        name,
    )


def _cells(columns: Sequence[_Column], row: object) -> Iterator[str]:
    for column in columns:
        yield (
            f'<td data-label="{column.title}"{_kind_of(column)}>'
            f"<span>{column.value(row)}</span></td>"
        )


def _kind_of(column: _Column) -> str:
    return ' class="number"' if column.is_number else ""


def _over(collective: Collective) -> str:
    return code(", ".join(collective.axes)) if collective.axes else UNKNOWN


def _kind(collective: Collective) -> str:
    if collective.operation is None:
        return escape(collective.kind)
    return f"{escape(collective.kind)} ({code(collective.operation)})"


def _where(sends: groups.Sends) -> str:
    collective = sends.first
    parts = [] if collective.source is None else [code(collective.source)]
    if collective.added_by_partitioner:
        parts.append("put in by the compiler")
    parts += map(escape, sends.causes)
    if operand := groups.operand(sends):
        parts.append(escape(operand.strip(" ()")))
    return ", ".join(parts) or UNKNOWN


# Words and numbers.


def box(content: str, name: str) -> str:
    """Scrolls on its own where it is wider than the page, also by keyboard."""
    return (
        f'<div class="box" tabindex="0" role="group" aria-label="{escape(name)}">'
        f"{content}</div>"
    )


def code(value: object) -> str:
    return f"<code>{escape(str(value))}</code>"


def source(source: str | None) -> str:
    return "" if source is None else f'<p class="quiet">{code(source)}</p>'


def type_of(array: ArrayLayout) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _number(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def bytes_of(count: float | None) -> str:
    return UNKNOWN if count is None else size(round(count))


def quantity(value: float | None) -> str:
    """A number with a prefix for thousands.

    >>> quantity(1234567.0), quantity(12.0), quantity(None)
    ('1.23 M', '12', 'unknown')
    """
    if value is None:
        return UNKNOWN
    prefixes = ["", "k", "M", "G", "T", "P"]
    while abs(value) >= 1000 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.3g} {prefixes[0]}".strip()


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return escape(text[:1].upper() + text[1:].rstrip(".") + ".") if text else ""
