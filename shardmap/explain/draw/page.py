"""An explanation as a page of text, for a terminal."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from shardmap.explain.draw import groups
from shardmap.explain.draw.groups import MOST_LINES, MOST_SENT
from shardmap.explain.draw.text import picture
from shardmap.explain.interconnect import Interconnect
from shardmap.explain.report import (
    ArrayLayout,
    Axis,
    Cost,
    Remark,
    Report,
)
from shardmap.units import duration, printable, size

NARROWEST = 40
_BOLD, _WARN, _FAINT, _PLAIN = "\033[1m", "\033[33m", "\033[2m", "\033[0m"


def page(report: Report, width: int | None = None, colour: bool | None = None) -> str:
    """The explanation as text.

    Args:
      report: what to write.
      width: how many columns there are. Default: the terminal's.
      colour: whether to use colours. Default: if standard output is a terminal and the
        environment does not have ``NO_COLOR``.

    Returns:
      The text, without a newline at its end.
    """
    if width is None:
        width = shutil.get_terminal_size().columns
    if colour is None:
        colour = _is_terminal() and not os.environ.get("NO_COLOR")
    lines = _Writer(max(width, NARROWEST), colour)
    lines.head(f"{report.name}: {_where(report)}")
    for sentence in groups.verdict(report):
        lines.add(sentence, 2)
    # The verdict has the first.
    for remark in report.remarks[1:MOST_LINES]:
        _remark(lines, remark)
    _more(lines, len(report.remarks), "remarks")
    said: set[str] = set()  # What is said once is not said again.
    if report.axes:
        lines.section("Axes")
        for axis in report.axes[:MOST_LINES]:
            _axis(lines, axis, said)
        _more(lines, len(report.axes), "axes")
    _arrays(lines, report)
    if report.pieces:
        lines.section("In pieces")
        for line in report.pieces:
            lines.add(line.strip(), 2 + len(line) - len(line.lstrip()))
    _collectives(lines, report, said)
    _costs(lines, report)
    if report.notes:
        lines.section("Notes")
        for note in report.notes:
            lines.add(note, 2)
    return "\n".join(lines.lines)


def _arrays(lines: "_Writer", report: Report) -> None:
    lines.section("Arrays")
    if len(report.arrays) > groups.MOST_ARRAYS:
        for arrays in groups.groups_of_arrays(report.arrays):
            lines.add(arrays.title, 2)
    else:
        for those in groups.alike(report.arrays):
            _array(lines, those)


def _collectives(lines: "_Writer", report: Report, said: set[str]) -> None:
    lines.section("Collectives")
    if not report.collectives:
        lines.add("none: nothing moves between devices", 2)
    sends = groups.groups_of_collectives(report.collectives)
    for sent in groups.most_sent(sends, MOST_SENT):
        _collective(lines, sent, said)
    if len(sends) > MOST_SENT:
        more = len(sends) - MOST_SENT
        text = f"and less by {more:,} more line{'s' * (more != 1)} of the program"
        lines.add(f"{text}, which the HTML page has", 2)
    if report.collectives and report.seconds is not None:
        assert report.interconnect is not None
        _wires(lines, report.interconnect, report.seconds)


def _costs(lines: "_Writer", report: Report) -> None:
    if report.cost is None:
        return
    lines.section("Cost of one call, on one device")
    for line in _cost(report.cost):
        lines.add(line, 2)
    for held, count in groups.counted(report.largest)[:3]:
        where = f" [{held.source}]" if held.source else ""
        lines.add(
            f"{count}{size(held.bytes)}: {held.type} of {held.operation}{where}", 6
        )


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # There is none, or it is closed.
        return False


class _Writer:
    """Collects lines that fit the width."""

    def __init__(self, width: int, colour: bool) -> None:
        self.width, self.colour = width, colour
        self.lines: list[str] = []

    def add(self, text: str, indent: int = 0, style: str = "") -> None:
        """Adds a paragraph; its lines but the first go in a little more."""
        for line in textwrap.wrap(
            printable(text),
            self.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + 2),
            break_on_hyphens=False,
        ):
            if style and self.colour:
                line = f"{style}{line}{_PLAIN}"
            self.lines.append(line)

    def head(self, text: str) -> None:
        self.add(text, style=_BOLD)

    def section(self, title: str) -> None:
        self.lines.append("")
        self.head(title)

    def block(self, text: str, indent: int) -> None:
        """Adds lines as they are."""
        self.lines += [f"{' ' * indent}{line}".rstrip() for line in text.splitlines()]


def _where(report: Report) -> str:
    count = report.num_devices
    kind = report.device_kind or "abstract"
    text = f"{count:,} {kind} device{'s' * (count != 1)}"
    if report.mesh:
        axes = ", ".join(f"{name!r}: {length:,}" for name, length in report.mesh)
        text += f", mesh {axes}"
    return text


def _remark(lines: _Writer, remark: Remark) -> None:
    source = f" [{remark.source}]" if remark.source else ""
    lines.add(f"! {remark.text}.{source} {remark.advice}", 0, _WARN)


def _axis(lines: _Writer, axis: Axis, said: set[str]) -> None:
    indent = 2 + 2 * axis.depth
    lines.add(f"{axis} ({axis.kind})", indent)
    lines.add(f"{axis.running}.", indent + 4)
    if axis.change not in said:
        lines.add(f"To change: {axis.change}", indent + 4)
    said.add(axis.change)
    if axis.source:
        lines.add(axis.source, indent + 4, _FAINT)


def _array(lines: _Writer, alike: Sequence[ArrayLayout]) -> None:
    """Arrays that differ in nothing but their path."""
    array = alike[0]
    paths = ", ".join(each.path for each in alike)
    shape = ",".join(map(str, array.shape))
    each = " each" if len(alike) > 1 else ""
    lines.add(f"{paths}: {array.dtype}[{shape}], {size(array.bytes)}{each}", 2)
    text = array.layout
    if array.shard_shape is not None and array.shard_bytes is not None:
        text += f"; a device has {array.shard_shape}, {size(array.shard_bytes)}"
    lines.add(text, 6)
    if array.spec is None or array.spec.num_shards == 1:
        return
    lines.add(repr(array.spec), 6, _FAINT)
    for most in (8, 6, 4, 3):
        drawn = picture(
            array.spec, array.shape, array.devices, max_pieces=most, max_grids=2
        )
        # What it is about is said above.
        _, _, boxes = drawn.partition("\n")
        if max(map(len, boxes.splitlines())) + 2 <= lines.width:
            lines.block(boxes, 2)
            return


def _more(lines: _Writer, count: int, what: str) -> None:
    if count > MOST_LINES:
        lines.add(f"and {count - MOST_LINES:,} more {what}", 2)


def _collective(lines: _Writer, sends: groups.Sends, said: set[str]) -> None:
    collective = sends.first
    count = "some" if sends.times is None else f"{sends.times:,}"
    most = "" if sends.same else "at most "
    over = "".join(f" {name!r}" for name in collective.axes)
    what = over and f"{collective.operation or ''} over{over}".strip()
    group = collective.group_size
    devices = "" if group is None else f"{group:,} devices"
    parts = ", ".join(filter(None, (what, devices)))
    text = (
        f"{count} x {collective.kind} ({parts}): {most}{size(sends.bytes_in)} in, "
        f"{size(sends.bytes_out)} out{groups.operand(sends)}"
    )
    if sends.link_bytes is not None:
        text += f"; a device sends {size(sends.link_bytes)}"
    if sends.seconds is not None:
        text += f", about {duration(sends.seconds)}"
    lines.add(text, 2)
    if collective.added_by_partitioner:
        why = "; ".join(sends.causes) or "the program has no such operation"
        lines.add(f"put in by the compiler: {why}", 6)
    for advice in sends.advice:
        if advice not in said:
            lines.add(f"To avoid: {advice}", 6)
    said.update(sends.advice)
    if collective.source:
        lines.add(collective.source, 6, _FAINT)


def _wires(lines: _Writer, wires: Interconnect, seconds: float) -> None:
    lines.add(
        f"Together about {duration(seconds)} on {wires.name} "
        f"({wires.bandwidth / 1e9:,g} GB/s a device, {duration(wires.latency)} a "
        f"message; {wires.source}). n bytes on g devices: an all-reduce sends "
        "2n(g-1)/g in 2(g-1) messages as a ring, 2n log2 g in 2 log2 g as a tree, the "
        "faster counts; all-gather n(g-1), reduce-scatter and all-to-all n(g-1)/g in "
        "g-1; collective-permute n in 1.",
        2,
    )


def _cost(cost: Cost) -> Iterator[str]:
    for value, text in (
        (cost.flops, "flops"),
        (cost.transcendentals, "exponentials and the like"),
        (cost.bytes_accessed, "bytes accessed"),
        (cost.intensity, "flops a byte (arithmetic intensity)"),
    ):
        if value is not None or text != "exponentials and the like":
            yield f"{'unknown' if value is None else f'{value:,.4g}'} {text}"
    parts = (
        ("arguments", cost.argument_bytes),
        ("results", cost.output_bytes),
        ("of these in the place of donated arguments", cost.donated_bytes or None),
        ("temporary", cost.temporary_bytes),
    )
    peak = "unknown" if cost.peak_bytes is None else size(cost.peak_bytes)
    known = [f"{name} {size(value)}" for name, value in parts if value is not None]
    yield f"{peak} of memory at the peak" + (f" ({', '.join(known)})" if known else "")
