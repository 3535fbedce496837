"""The documents of reports and plans."""

import collections
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from shardmap.explaining.draw.document import (
    Block,
    Code,
    Document,
    Group,
    Inline,
    Paragraph,
    Preformatted,
    Row,
    Table,
    folded,
    paragraph,
    section,
)
from shardmap.explaining.draw.grids import drawing_of_spec
from shardmap.explaining.report import (
    ArrayLayout,
    Axis,
    Collective,
    Held,
    Remark,
    Report,
    argument_of,
)
from shardmap.sharding.spec import ShardedAxis, ShardingSpec, Unstacked
from shardmap.units import count, duration, size

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")

MOST_AXES, MOST_REMARKS, MOST_COLLECTIVES = 8, 8, 5
"""How many are shown; the others are in a fold."""
LEAST_SHOWN = 0.01
"""Values that are a smaller part of the peak memory are not listed."""


def of_report(report: Report) -> Document:
    """The document of a report."""
    said: set[str] = set()
    axes = [_axis(axis, said) for axis in report.axes]
    remarks = [_remark(number, each) for number, each in enumerate(report.remarks)]
    return Document(
        report.name,
        where(report),
        (
            paragraph(_parallel(report)),
            paragraph(f"{report.summary[:1].upper()}{report.summary[1:]}."),
            *folded(remarks, MOST_REMARKS, "remarks"),
            *_mesh(report),
            section("Axes", folded(axes, MOST_AXES, "axes")),
            section("Arrays", _arrays(report.arrays)),
            section("In pieces", _lines(report.pieces)),
            section("Collectives, on one device", _collectives(report, said)),
            section("Cost of one call, on one device", _cost(report)),
            section("Notes", map(paragraph, report.notes)),
        ),
    )


def of_plan(title: str, lines: Sequence[str]) -> Document:
    """The document of a plan, of a title such as ``f: 4 shards`` and what it tells."""
    name, _, lead = title.partition(": ")
    return Document(name, lead, (section("Cuts and stages", _lines(lines)),))


def _mesh(report: Report) -> Iterator[Block]:
    """The device at each place of the mesh; none for 0, 1, 2 and so on in a row."""
    names, sizes = zip(*report.mesh, strict=True) if report.mesh else ((), ())
    if sum(size > 1 for size in sizes) > 1 or report.mesh_devices:
        spec = ShardingSpec(map(Unstacked, sizes), map(ShardedAxis, range(len(sizes))))
        title = f"Devices of the mesh {' x '.join(map(repr, names))}"
        drawing = drawing_of_spec(spec, sizes, report.mesh_devices)
        yield Group((title,), (drawing,), "page")


def _lines(lines: Sequence[str]) -> tuple[Block, ...]:
    return (Preformatted(tuple(lines)),) if lines else ()


def where(report: Report) -> str:
    """What it runs on, in one line."""
    several = "s" * (report.num_devices != 1)
    text = f"{report.num_devices:,} {report.device_kind} device{several}"
    if report.mesh:
        axes = ", ".join(f"{name!r}: {length:,}" for name, length in report.mesh)
        text += f", mesh {axes}"
    if report.machine is not None:
        text += f"; compiled for {report.machine}; not run"
    return text


def _remark(number: int, remark: Remark) -> Paragraph:
    lead = "" if number else "Change first: "
    where = f" [{remark.source}]" if remark.source else ""
    return paragraph(f"{lead}{remark.text}.{where} {remark.advice}", style="warning")


def _parallel(report: Report) -> str:
    """A sentence on what runs in parallel."""
    names = [
        f"{'an axis' if axis.name is None else repr(axis.name)} over "
        f"{axis.devices:,} devices"
        for axis in report.axes
        if axis.devices > 1 and not axis.is_repeated
    ]
    if names:
        return f"In parallel: {', '.join(names)}."
    if report.num_devices > 1:
        return (
            f"Nothing is sharded: each of {report.num_devices:,} devices does the same."
        )
    there = f" of {report.available:,}" if (report.available or 1) > 1 else ""
    return f"One program on one device{there}."


_CHANGES = {
    "vmap": "Use spmap to run it on devices, or jax.lax.map with batch_size= to bound "
    "the memory.",
    "shard_map": "The shape of mesh= sets the number of devices. in_specs= and "
    "out_specs= of jax.shard_map, or in_axes= and out_axes= of mesh_map, set what is "
    "sharded.",
    "pmap": "Give jax.pmap devices=. Its axis has one element per device; the axis of "
    "shardmap.spmap may have any length.",
    "sharding": "The arrays' shardings say how many devices: jax.device_put, "
    "in_shardings= or jax.lax.with_sharding_constraint.",
    "while": "jax.lax.fori_loop or jax.lax.scan have a fixed number of steps.",
    "loop": "No step needs the one before: vmap runs all at once, spmap runs them on "
    "devices, and jax.lax.map with batch_size= vectorises some at a time.",
    "loop in turn": "Each step takes what the one before gave. If that is only a sum, "
    "vmap the rest of the step and add up the results; if the step is associative, use "
    "jax.lax.associative_scan.",
    "chunked": "in_slices= of chunked sets the cuts, and memory= the memory of a "
    "piece. Fewer, larger pieces need more memory.",
    "spmap": "Give devices=, or mesh= and mesh_axes=, for other devices; axis_size=, "
    "or longer arrays, for more elements.",
    "spmap in steps": "Give devices=, or mesh= and mesh_axes=, for other devices; a "
    "larger batch_size= to vectorise more elements at once.",
    "vectorised spmap": "Give devices=, or mesh= and mesh_axes=, for other devices; "
    "batch_size= to vectorise fewer elements at once; axis_size=, or longer arrays, "
    "for more elements.",
    "spmap inside": "The outermost map has the devices: give it more of them, or give "
    "both maps mesh= and mesh_axes= of one mesh.",
}
"""What changes how an axis runs, by its kind."""


def _axis(axis: Axis, said: set[str]) -> Group:
    kind: str = axis.kind
    if axis.in_turn:
        kind = "loop in turn"
    elif kind == "vmap" and axis.devices > 1:
        kind = "sharding"
    elif kind == "spmap" and axis.depth and any("spmap" in each for each in said):
        kind = "spmap inside"
    elif kind == "spmap" and axis.steps != 1:
        kind = "spmap in steps"
    elif kind == "spmap" and axis.vectorised > 1:
        kind = "vectorised spmap"
    blocks = []
    if kind not in said:
        blocks.append(paragraph(f"To change: {_CHANGES[kind]}"))
    said.add(kind)
    if axis.source:
        blocks.append(paragraph(Code(axis.source), style="quiet"))
    return Group((f"{axis} ({axis.kind})",), tuple(blocks), "card", axis.depth)


def _arrays(arrays: Sequence[ArrayLayout]) -> Iterator[Group]:
    """A card for each layout, with its picture and its arrays by argument."""
    for alike in grouped(_lies, arrays).values():
        first = alike[0]
        several = f", used by {len(alike):,} arrays" if len(alike) > 1 else ""
        title = f"{first.layout[:1].upper()}{first.layout[1:]}{several}"
        parts = grouped(lambda array: argument_of(array.path), alike)
        yield Group(
            (title,), (*map(_argument, parts.values()), *_picture(alike)), "card"
        )


def _lies(array: ArrayLayout) -> tuple[Any, ...]:
    """How an array is cut, and where: words do not tell the order of devices."""
    if array.spec is None:
        return (array.layout,)
    cuts = tuple(entry for entry in array.spec.sharding if entry is not None)
    return array.layout, array.devices, array.spec.mesh_mapping, cuts


def grouped(
    key: Callable[[_Item], _Key], items: Iterable[_Item]
) -> dict[_Key, list[_Item]]:
    """The items by what the function gives for them."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _picture(alike: Sequence[ArrayLayout]) -> Iterator[Block]:
    """The spec and the picture of the first array that has a layout."""
    first = alike[0]
    if first.spec is None or first.spec.num_shards == 1:
        return
    if first.copies != first.num_devices:
        is_one = all(array.shape == first.shape for array in alike)
        whose = () if is_one else ("For ", Code(first.path), ": ")
        yield paragraph(*whose, Code(first.spec), style="quiet")
    yield drawing_of_spec(first.spec, first.shape, first.devices)


def _argument(arrays: Sequence[ArrayLayout]) -> Block:
    """The arrays of an argument that have a layout: a line, or a fold with a table.

    Such as ``67 arrays, 1.3 MiB; a device has 168.0 KiB``.
    """
    first, types = arrays[0], {each.type for each in arrays}
    of_type = first.shard_shape if len(arrays) == 1 else None
    what = f"{len(arrays):,} arrays"
    if len(types) == 1:
        what = f"{len(arrays):,} x " * (len(arrays) > 1) + first.type
    whole = sum(array.bytes for array in arrays)
    held = sum(array.shard_bytes or 0 for array in arrays)
    said = f": {what}, {size(whole)}"
    if first.shard_bytes is not None and held != whole:
        said += f"; a device has {f'{of_type}, ' if of_type else ''}{size(held)}"
    if len(arrays) == 1:
        return paragraph(Code(first.path), said)
    title = (Code(first.path), f" and {len(arrays) - 1:,} more", said)
    rows = [
        Row((Code(each.path), Code(each.type), size(each.bytes), of_device))
        for each in arrays
        for of_device in [known(each.shard_bytes)]
    ]
    table = Table(("Array", "Type", "Bytes", "On a device"), tuple(rows))
    return Group(title, (table,), "fold")


def known(value: Any, write: Callable[[Any], str] = size) -> str:
    """A number for people; "unknown" for None."""
    return "unknown" if value is None else write(value)


def _total(counts: Iterable[float | None]) -> float | None:
    """The sum; None if one of the numbers is unknown."""
    numbers = [*counts]
    return None if None in numbers else sum(filter(None, numbers))


def _collectives(report: Report, said: set[str]) -> Iterator[Block]:
    """Tables of collectives by kind, axes and line, those that send most first."""
    line = operator.attrgetter("kind", "operation", "axes", "group_size", "source")
    groups = sorted(grouped(line, report.collectives).values(), key=_sent, reverse=True)
    if not groups:
        return
    first, others = groups[:MOST_COLLECTIVES], groups[MOST_COLLECTIVES:]
    joined = report.interconnect
    yield _table(first, said, joined is not None)
    if others:
        lines = "line" if len(others) == 1 else "lines"
        title = f"{len(others):,} more {lines} of the program, which send less"
        yield Group((title,), (_table(others, said, joined is not None),), "fold")
    if joined is not None and report.seconds:
        text = (
            f"Together at least {duration(report.seconds)}, on {joined.name}: "
            f"{joined.bandwidth / 1e9:,.4g} GB/s from a device, "
            f"{duration(joined.latency)} a link ({joined.source})"
        )
        if report.network is not None:
            text += f"; {report.network_text}, {report.network.source}"
        yield paragraph(f"{text}.")


def _sent(group: Sequence[Collective]) -> float:
    """What a row sends; of an unknown number of bytes, infinitely many."""
    total = _total(each.link_bytes for each in group)
    return math.inf if total is None else total


def _table(
    groups: Sequence[Sequence[Collective]], said: set[str], has_times: bool
) -> Table:
    titles = ["Collective", "Times", "Devices", "In, each", "Out, each", "Sent in all"]
    titles += ["Time in all"] * has_times
    rows = (_row(group, said, has_times) for group in groups)
    return Table(tuple(titles), tuple(rows))


def _row(group: Sequence[Collective], said: set[str], has_times: bool) -> Row:
    """The row of collectives of one kind, over the same axes, for one line."""
    first = group[0]
    is_one_size = len({(each.bytes_in, each.bytes_out) for each in group}) == 1
    at_most = "" if is_one_size else "<= "
    times = _total(each.count for each in group)
    cells = [
        first.kind,
        "some" if times is None else f"{times:,}",
        known(first.group_size, "{:,}".format),
        at_most + size(max(each.bytes_in for each in group)),
        at_most + size(max(each.bytes_out for each in group)),
        known(_total(each.link_bytes for each in group)),
    ]
    if has_times:
        cells.append(known(_total(each.seconds for each in group), duration))
    types = dict.fromkeys(filter(None, (first.before, first.after)))
    operand = " -> ".join(types) if is_one_size else ""
    return Row(tuple(cells), tuple(_about(group, operand, said)))


def _about(
    group: Sequence[Collective], operand: str, said: set[str]
) -> Iterator[Paragraph]:
    """The operation, the line, the causes and the advice of a row."""
    first = group[0]
    what: Inline = (", ".join(filter(None, (first.title, operand))),)
    if first.source:
        what = (*what, " at " if what[0] else "", Code(first.source))
    if any(what):
        yield Paragraph(what)
    for cause in dict.fromkeys(each.cause for each in group if each.cause):
        yield paragraph(f"Added by the compiler: {cause}.")
    for advice in [each.advice for each in group if each.advice]:
        if advice not in said:
            yield paragraph(f"To avoid: {advice}")
        said.add(advice)


def _cost(report: Report) -> Iterator[Block]:
    cost = report.cost
    if cost is None:
        return
    counted = [
        Row(("Floating point operations", known(cost.flops, count))),
        Row(("Bytes read and written", known(cost.bytes_accessed))),
    ]
    parts = (
        ("arguments", cost.argument_bytes),
        ("results", cost.output_bytes),
        ("of these in the place of donated arguments", cost.donated_bytes or None),
        ("temporary", cost.temporary_bytes),
    )
    said = ", ".join(f"{name} {size(each)}" for name, each in parts if each is not None)
    notes = (paragraph(said),) if said else ()
    rows = [Row(("Memory at the peak", known(cost.peak_bytes)), notes)]
    if cost.host_bytes is not None:
        rows.append(Row(("Memory of the host", size(cost.host_bytes))))
    yield Table(("", ""), (*(() if report.is_refused else counted), *rows))
    least = LEAST_SHOWN * (cost.peak_bytes or 0)
    large = [held for held in report.largest if held.bytes >= least]
    held = [_held(*each) for each in collections.Counter(large).items()]
    if held:
        where = "of the program" if report.is_refused else "at the peak"
        yield paragraph(f"Largest values {where}:")
        yield from folded(held, 3, "values")
    if report.busiest:
        yield paragraph(
            "Most cycles, by the compiler's rough estimate, without what moves:"
        )
    for line, share in report.busiest:
        yield paragraph(f"{share:.0%} at ", Code(line))


def _held(held: Held, times: int) -> Paragraph:
    text = f"{size(held.bytes)}: {held.type} of {held.operation}"
    text = f"{times:,} x {text}" if times > 1 else text
    if held.source is None:
        return paragraph(text)
    return paragraph(f"{text} at ", Code(held.source))
