"""The stored results as one picture, and as a table of the docs.

Both read what `harness.as_json` gives, so that no benchmark has to run again for them.
"""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.harness import OURS, duration

ROW_INCHES = 0.24
LEFT = 0.51  # The part of the picture that the names take.
COLOURS = {"ok": "#0b6e4f", "MISS": "#c1121f", "": "#4a5568"}
MEANINGS = {"ok": "within its limit", "MISS": "over its limit", "": "has no limit"}


class Ratio(NamedTuple):
    """Our median time divided by a peer's; one row of the picture and of the table."""

    benchmark: str
    peer: str
    ours: float
    its: float
    ratio: float
    limit: float | None
    verdict: str
    runs: int


def ratios(data: Mapping[str, Any]) -> Iterator[Ratio]:
    """All rows of stored results, in order."""
    for benchmark in data["benchmarks"]:
        contenders = benchmark["contenders"]
        for peer, result in contenders.items():
            if peer != OURS:
                yield Ratio(
                    benchmark["name"],
                    peer,
                    contenders[OURS]["median"],
                    result["median"],
                    result["ratio"],
                    result["limit"],
                    result["verdict"],
                    result["runs"],
                )


def versions_line(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in data["versions"].items())


def markdown(data: Mapping[str, Any]) -> str:
    """The rows as a Markdown table, the versions above it."""
    lines = [
        f"Measured with {versions_line(data)}.",
        "",
        "| benchmark | against | shardmap | it | ratio | limit | | runs |",
        "|---|---|---:|---:|---:|---:|---|---:|",
    ]
    previous = None
    for row in ratios(data):
        cells = [
            row.benchmark if row.benchmark != previous else "",
            row.peer,
            _unbroken(row.ours),
            _unbroken(row.its),
            f"{row.ratio:.2f}",
            "" if row.limit is None else f"{row.limit:.2f}",
            row.verdict,
            row.runs,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        previous = row.benchmark
    return "\n".join(lines)


def _unbroken(seconds: float) -> str:
    return duration(seconds).replace(" ", "&nbsp;")


TABLE = re.compile(r"(?s)(?<=<!-- table -->\n\n).*(?=\n\n<!-- end of table -->)")
"""Where the table stands in the page of the docs."""


def write_docs(data: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Stores results in the docs: as JSON, as a picture, and as the page's table."""
    (folder / "benchmarks.json").write_text(json.dumps(data, indent=1) + "\n")
    draw(data, folder / "benchmarks.svg")
    page = folder / "benchmarks.md"
    page.write_text(TABLE.sub(lambda _: markdown(data), page.read_text()))


def draw(data: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws the ratios as a chart of dots, one line each, on a logarithmic scale.

    Args:
      data: what `harness.as_json` gave.
      path: the picture to write; its suffix, such as .svg or .png, says which kind.
    """
    import matplotlib

    matplotlib.use("agg")
    # Text stays text: it can be searched, and the same data give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "benchmarks"})
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator
    from matplotlib.transforms import blended_transform_factory

    rows = list(ratios(data))
    height = ROW_INCHES * len(rows) + 1.5
    figure, axes = pyplot.subplots(figsize=(9, height), facecolor="white")
    figure.subplots_adjust(
        left=LEFT, right=0.95, top=1 - 0.62 / height, bottom=0.88 / height
    )
    axes.set_xscale("log")
    values = [row.ratio for row in rows] + [row.limit for row in rows if row.limit]
    axes.set_xlim(min(0.5, *values) / 1.4, max(2, *values) * 1.9)
    axes.set_ylim(len(rows) - 0.4, -0.6)

    beside = blended_transform_factory(figure.transFigure, axes.transData)
    shaded = False
    for number, row in enumerate(rows):
        if number == 0 or row.benchmark != rows[number - 1].benchmark:
            shaded = not shaded
            axes.text(
                0.02, number, row.benchmark, transform=beside, va="center", fontsize=9
            )
        if shaded:
            axes.axhspan(number - 0.5, number + 0.5, color="#f4f5f7", zorder=0)
        axes.text(
            LEFT - 0.01,
            number,
            row.peer,
            transform=beside,
            ha="right",
            va="center",
            fontsize=8,
            color="#4a5568",
        )
        colour = COLOURS[row.verdict]
        axes.plot([1, row.ratio], [number, number], color=colour, linewidth=1.2)
        if row.limit is not None:
            axes.plot(
                [row.limit] * 2,
                [number - 0.36, number + 0.36],
                color="black",
                linewidth=1.6,
                zorder=4,
            )
        axes.plot(row.ratio, number, "o", color=colour, markersize=5.5, zorder=5)
        furthest = max(row.ratio, 1, row.limit or 0)
        axes.text(
            furthest * 1.09,
            number,
            f"{row.ratio:.2f}",
            va="center",
            fontsize=8,
            color=colour,
            clip_on=True,
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    figure.suptitle(
        "shardmap's median time divided by its peer's: left of 1, shardmap is faster",
        x=0.02,
        y=1 - 0.22 / height,
        ha="left",
        fontsize=11,
    )
    figure.text(0.02, 0.12 / height, versions_line(data), fontsize=7, color="#4a5568")
    present = {row.verdict for row in rows}
    marks = [
        Line2D([], [], marker="o", linestyle="", color=COLOURS[verdict], label=meaning)
        for verdict, meaning in MEANINGS.items()
        if verdict in present
    ]
    limit = Line2D([], [], marker="|", linestyle="", color="black", label="the limit")
    figure.legend(
        handles=[*marks, limit],
        loc="lower left",
        bbox_to_anchor=(0.01, 0.25 / height),
        ncols=4,
        frameon=False,
        fontsize=8,
        handletextpad=0.2,
    )
    undated = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=undated)
    pyplot.close(figure)
