"""The documents of several reports: a row for each, and what differs between two."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardmap.explaining.draw import sections
from shardmap.explaining.draw.document import (
    Block,
    Card,
    Code,
    Details,
    Document,
    Row,
    Section,
    Table,
    paragraph,
)
from shardmap.explaining.report import Collective, Report
from shardmap.units import count, duration, size, size_of

_TITLES = ("Fits", "Peak of memory", "Sent", "At least", "In turn", "Bound by")


class Named(NamedTuple):
    """A row: the name of what is compared, and its report, or why there is none."""

    name: str
    report: Report | None
    why: str = ""


def of_reports(
    title: str, lead: str, what: str, rows: Sequence[Named], is_page: bool, *says: str
) -> Document:
    """A table with a row for each report; a page folds the reports below it.

    Args:
      title: the name of the function.
      lead: one line on all of them.
      what: the title of the first column.
      rows: the reports.
      is_page: whether it is for a page.
      *says: sentences above the table.
    """
    table = Table((what, *_TITLES), tuple(map(_row, rows)))
    folds = tuple(
        Details(each.name, tuple(_inside(each.report)))
        for each in rows
        if is_page and each.report is not None
    )
    return Document(
        title, lead, (*map(paragraph, says), table), (Section("Reports", folds),)
    )


def _row(row: Named) -> Row:
    report = row.report
    if report is None:
        return Row((row.name, "no", *[""] * 5), (paragraph(row.why, style="quiet"),))
    return Row((row.name, *figures(report)))


def figures(report: Report) -> tuple[str, ...]:
    """What a row says of a report: the cells of `_TITLES`."""
    peak, least, in_turn = report.peak_bytes, report.least_seconds, report.in_turn
    of_memory = sections.UNKNOWN if peak is None else size(peak)
    if peak is not None and report.capacity is not None:
        of_memory = size_of(peak, report.capacity)
    return (
        {True: "yes", False: "no", None: sections.UNKNOWN}[report.fits],
        of_memory,
        sections.UNKNOWN if report.is_refused else size(report.sent_bytes),
        duration(least) if least else sections.UNKNOWN,
        duration(in_turn) if in_turn else sections.UNKNOWN,
        report.bound_by or "",
    )


def _inside(report: Report) -> Iterator[Block]:
    document = sections.of_report(report)
    yield paragraph(document.lead)
    yield from document.blocks
    for each in document.sections:
        if each.blocks:
            yield Card((each.title,), each.blocks)


def of_changes(before: Report, after: Report) -> Document:
    """What differs between the reports of two versions of a program."""
    titles = ("", "Before", "After")
    figures_ = tuple(_differing(dict(_facts(before)), dict(_facts(after))))
    arrays = tuple(_differing(_layouts(before), _layouts(after), Code))
    sent = tuple(_differing(_sent(before), _sent(after)))
    tables = {"Figures": figures_, "Arrays": arrays, "Collectives": sent}
    same = () if any(tables.values()) else (paragraph("Nothing differs."),)
    return Document(
        after.name,
        f"compared with {before.name}",
        same,
        tuple(
            Section(title, (Table(titles, rows),) if rows else ())
            for title, rows in tables.items()
        ),
    )


def _differing(
    before: dict[str, str], after: dict[str, str], code: type[str] = str
) -> Iterator[Row]:
    for key in dict.fromkeys((*before, *after)):
        pair = before.get(key, "-"), after.get(key, "-")
        if pair[0] != pair[1]:
            yield Row((code(key), *pair))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "Devices", f"{report.num_devices:,} {report.device_kind}"
    yield "Mesh", ", ".join(f"{name!r}: {length:,}" for name, length in report.mesh)
    yield from zip(_TITLES, figures(report), strict=True)
    cost = report.cost
    if cost is not None and not report.is_refused:
        yield "Arguments", size(cost.argument_bytes or 0)
        yield "Results", size(cost.output_bytes or 0)
        yield "Temporary values", size(cost.temporary_bytes or 0)
        yield "Floating point operations", count(cost.flops or 0)


def _layouts(report: Report) -> dict[str, str]:
    return {
        each.path: f"{each.dtype}{list(each.shape)}, {each.layout}"
        for each in report.arrays
    }


def _sent(report: Report) -> dict[str, str]:
    """What collectives of a kind send, for each function that has them.

    Lines differ between versions of a program.
    """
    groups: dict[str, list[Collective]] = {}
    for each in report.collectives:
        over = ", ".join(map(repr, each.axes))
        place = (each.source or "").partition(" (")[2].rstrip(")")
        words = [each.kind, each.operation or ""]
        words += [f"over {over}"] * bool(over) + [f"in {place}"] * bool(place)
        groups.setdefault(" ".join(filter(None, words)), []).append(each)
    return {
        key: f"{sum(each.count or 0 for each in those):,} x, "
        f"{size(sum(each.link_bytes or 0 for each in those))}"
        for key, those in groups.items()
    }
