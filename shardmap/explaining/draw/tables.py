"""The documents of several reports: a row for each, and what differs between two."""

from collections.abc import Iterator, Sequence

from shardmap.explaining.draw.document import (
    Document,
    Group,
    Row,
    Table,
    paragraph,
    section,
)
from shardmap.explaining.draw.sections import grouped, known, of_report, where
from shardmap.explaining.report import Collective, Report
from shardmap.units import count, duration, size

_TITLES = ("Fits", "Peak of memory", "Sent", "At least", "In turn", "Bound by")


def of_reports(
    title: str,
    lead: str,
    what: str,
    rows: Sequence[tuple[str, Report | str]],
    *says: str,
) -> Document:
    """A table with a row for each report, below sentences; a page folds the reports.

    Args:
      title, lead: the name of the function, and one line on all reports.
      what: the title of the first column.
      rows: the name of what is compared, and its report, or why there is none.
      *says: the sentences.
    """
    table = Table((what, *_TITLES), tuple(_row(*row) for row in rows))
    pages = [_page(name, each) for name, each in rows if isinstance(each, Report)]
    return Document(title, lead, (*map(paragraph, says), table, *pages))


def _page(name: str, report: Report) -> Group:
    document = of_report(report)
    return Group((name,), (paragraph(document.lead), *document.blocks), "page")


def _row(name: str, report: Report | str) -> Row:
    if isinstance(report, str):
        return Row((name, "no", *[""] * 5), (paragraph(report, style="quiet"),))
    return Row((name, *figures(report)))


def figures(report: Report) -> tuple[str, ...]:
    """What a row says of a report: the cells of `_TITLES`."""
    return (
        {True: "yes", False: "no", None: "unknown"}[report.fits],
        report.needed or "unknown",
        known(None if report.is_refused else report.sent_bytes),
        known(report.least_seconds or None, duration),
        known(report.in_turn or None, duration),
        report.bound_by or "",
    )


def of_changes(before: Report, after: Report) -> Document:
    """What differs between the reports of two versions of a program."""
    tables = {
        "Figures": _differing(dict(_facts(before)), dict(_facts(after))),
        "Arrays": _differing(_layouts(before), _layouts(after)),
        "Collectives": _differing(_sent(before), _sent(after)),
    }
    blocks = [section(*each) for each in tables.items() if each[1]]
    return Document(
        after.name,
        f"compared with {before.name}",
        (*blocks,) or (paragraph("Nothing differs."),),
    )


def _differing(before: dict[str, str], after: dict[str, str]) -> list[Table]:
    """A table of what differs; none if nothing does."""
    rows = [
        Row((key, before.get(key, "-"), after.get(key, "-")))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]
    return [Table(("", "Before", "After"), tuple(rows))] if rows else []


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "Runs on", where(report)
    yield from zip(_TITLES, figures(report), strict=True)
    cost = report.cost
    if cost is not None and not report.is_refused:
        yield "Arguments", size(cost.argument_bytes or 0)
        yield "Results", size(cost.output_bytes or 0)
        yield "Temporary values", size(cost.temporary_bytes or 0)
        yield "Floating point operations", count(cost.flops or 0)


def _layouts(report: Report) -> dict[str, str]:
    return {each.path: f"{each.type}, {each.layout}" for each in report.arrays}


def _sent(report: Report) -> dict[str, str]:
    """What collectives of a kind send, for each function that has them.

    Lines differ between versions of a program.
    """
    return {
        key: f"{sum(each.count or 0 for each in those):,} x, "
        f"{size(sum(each.link_bytes or 0 for each in those))}"
        for key, those in grouped(_kind_and_place, report.collectives).items()
    }


def _kind_and_place(each: Collective) -> str:
    place = (each.source or "").partition(" (")[2].rstrip(")")
    return " ".join(filter(None, (each.kind, each.title, place and f"in {place}")))
