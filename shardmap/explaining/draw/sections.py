"""The documents of reports, plans and specs."""

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

from shardmap.explaining.draw.document import (
    Block,
    Card,
    Code,
    Details,
    Document,
    Inline,
    Paragraph,
    Preformatted,
    Row,
    Section,
    Table,
    folded,
    paragraph,
)
from shardmap.explaining.draw.grids import (
    drawing_of_mesh,
    drawing_of_spec,
)
from shardmap.explaining.report import (
    ArrayLayout,
    Axis,
    Collective,
    Cost,
    Held,
    Remark,
    Report,
    argument_of,
    describe,
)
from shardmap.sharding.spec import ShardingSpec
from shardmap.units import count, duration, size

UNKNOWN = "unknown"
MOST_CARDS = 8
"""More arrays than these are summed up by prefix and layout."""
MOST_AXES, MOST_REMARKS, MOST_COLLECTIVES = 8, 8, 5
"""How many are shown; the others are in a fold."""
MOST_PATHS = 2
"""How many of the arrays in a fold text names."""
LEAST_SHOWN = 0.01
"""Values that are a smaller part of the peak memory are not listed."""


def of_report(report: Report) -> Document:
    """The document of a report."""
    said: set[str] = set()  # The summary has the first remark.
    axes = [_axis(axis, report.axes, said) for axis in report.axes]
    remarks = [_remark(number, each) for number, each in enumerate(report.remarks)]
    return Document(
        report.name,
        _where(report),
        (
            paragraph(_parallel(report)),
            paragraph(f"{report.summary[:1].upper()}{report.summary[1:]}."),
            *folded(remarks, MOST_REMARKS, "remarks"),
            *_mesh(report),
        ),
        (
            Section("Axes", folded(axes, MOST_AXES, "axes")),
            Section("Arrays", tuple(_arrays(report.arrays))),
            Section("In pieces", _lines(report.pieces)),
            Section("Collectives, on one device", tuple(_collectives(report, said))),
            Section("Cost of one call, on one device", tuple(_cost(report))),
            Section("Notes", tuple(map(paragraph, report.notes))),
        ),
    )


def of_plan(title: str, lines: Sequence[str]) -> Document:
    """The document of a plan.

    Args:
      title: one line with the numbers of shards and bytes.
      lines: lines on each axis of each argument, then on each stage.
    """
    name, _, lead = title.partition(": ")
    return Document(name, lead, (), (Section("Cuts and stages", _lines(lines)),))


def of_spec(spec: ShardingSpec, shape: tuple[int, ...] | None) -> Document:
    """The document of a spec; without a shape, shards have numbers, not ranges."""
    drawing = drawing_of_spec(spec, spec.tile_counts if shape is None else shape)
    if shape is None:
        labels = [list(map(str, range(count))) for count in spec.tile_counts]
        drawing = dataclasses.replace(drawing, labels=labels)
    said = paragraph(f"{describe(spec).capitalize()}.")
    return Document("", "", (paragraph(Code(spec)), said, drawing))


def _mesh(report: Report) -> Iterator[Block]:
    """The device at each position of the mesh; none for 0, 1, 2 and so on in a row."""
    is_row = sum(size > 1 for _, size in report.mesh) < 2 and not report.mesh_devices
    if not is_row:
        yield drawing_of_mesh(report.mesh, report.mesh_devices)


def _lines(lines: Sequence[str]) -> tuple[Block, ...]:
    return (Preformatted(tuple(lines)),) if lines else ()


def _where(report: Report) -> str:
    several = "s" * (report.num_devices != 1)
    text = f"{report.num_devices:,} {report.device_kind} device{several}"
    if report.mesh:
        axes = ", ".join(f"{name!r}: {length:,}" for name, length in report.mesh)
        text += f", mesh {axes}"
    if report.machine is not None:
        text += f"; compiled for {report.machine}; not run"
    if report.network is not None:
        text += f"; {report.network_text}"
    return text


def _remark(number: int, remark: Remark) -> Paragraph:
    lead = "" if number else "Change first: "
    where = f" [{remark.source}]" if remark.source else ""
    return paragraph(f"{lead}{remark.text}.{where} {remark.advice}", style="warning")


def _parallel(report: Report) -> str:
    """A sentence on what runs in parallel."""
    cut = [axis for axis in report.axes if axis.devices > 1 and not axis.is_repeated]
    if not cut:
        return _not_parallel(report)
    names = [
        f"{'an axis' if axis.name is None else repr(axis.name)} over "
        f"{axis.devices:,} devices"
        for axis in cut[:3]
    ]
    more = f" and {len(cut) - 3:,} more" if len(cut) > 3 else ""
    text = f"In parallel: {', '.join(names)}{more}"
    if report.available is not None and report.available > report.num_devices:
        text += f", on {report.num_devices:,} of the {report.available:,} there"
    return f"{text}."


def _not_parallel(report: Report) -> str:
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


def _axis(axis: Axis, axes: Sequence[Axis], said: set[str]) -> Card:
    kind: str = axis.kind
    if axis.in_turn:
        kind = "loop in turn"
    elif kind == "vmap" and axis.devices > 1:
        kind = "sharding"
    elif kind == "spmap" and "spmap" in _kinds_around(axis, axes):
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
        blocks.append(_source(axis.source))
    return Card((f"{axis} ({axis.kind})",), tuple(blocks), axis.depth)


def _kinds_around(axis: Axis, axes: Sequence[Axis]) -> Iterator[str]:
    while axis.inside is not None:
        axis = axes[axis.inside]
        yield axis.kind


def _source(source: str) -> Paragraph:
    return paragraph(Code(source), style="quiet")


def _arrays(arrays: Sequence[ArrayLayout]) -> Iterator[Block]:
    """A card for equal arrays; for many arrays, one for each layout, and folds."""
    drawn: dict[str, str] = {}
    if len(arrays) > MOST_CARDS:
        by_layout: dict[str, list[ArrayLayout]] = {}
        for array in arrays:
            by_layout.setdefault(array.layout, []).append(array)
        for alike in by_layout.values():
            yield _card_of_layout(alike, drawn)
        return
    equal: dict[ArrayLayout, list[ArrayLayout]] = {}
    for array in arrays:
        key = dataclasses.replace(array, path="", role="input")
        equal.setdefault(key, []).append(array)
    for those in equal.values():
        paths, text = [array.path for array in those], _description(those)
        blocks = tuple(_layout(those[0], drawn))
        yield Card((Code(", ".join(paths)), f": {text}"), blocks)


def _card_of_layout(arrays: Sequence[ArrayLayout], drawn: dict[str, str]) -> Card:
    """A layout and its picture, and a fold for each argument.

    Args:
      arrays: those that have the layout.
      drawn: the first array of each picture.
    """
    first = arrays[0]
    picture = tuple(_layout(first, drawn))[1:]  # Without the spec of the first.
    are_cut = picture and first.copies != first.num_devices
    if are_cut and any(array.shape != first.shape for array in arrays):
        picture = (paragraph("For ", Code(first.path), ":"), *picture)
    parts: dict[str, list[ArrayLayout]] = {}
    for array in arrays:
        parts.setdefault(argument_of(array.path), []).append(array)
    folds = []
    for root, those in parts.items():
        paths = [array.path for array in those]
        title = f"{paths[0] if len(paths) == 1 else root}: {_amount(those, '')}"
        folds.append(Details(title, (_table_of_arrays(those),), _few(paths)))
    used = f", used by {len(arrays):,} array{'s' * (len(arrays) > 1)}"
    title = f"{first.layout[:1].upper()}{first.layout[1:]}{used}"
    return Card((title,), (*picture, *folds))


def _few(paths: Sequence[str]) -> str:
    """The first of several paths, such as ``x['a'], x['b'] and 4 more``."""
    more = len(paths) - MOST_PATHS
    rest = f" and {more:,} more" if more > 0 else ""
    return ", ".join(paths[:MOST_PATHS]) + rest if len(paths) > 1 else ""


def _description(arrays: Sequence[ArrayLayout]) -> str:
    """Such as ``67 arrays, 1.3 MiB, replicated on 8 devices``."""
    return _amount(arrays, f", {arrays[0].layout}")


def _amount(arrays: Sequence[ArrayLayout], layout: str) -> str:
    """Such as ``67 arrays, 1.3 MiB``, the layout, and what a device has of them."""
    first, count = arrays[0], len(arrays)
    is_one_type = len({_type_of(array) for array in arrays}) == 1
    counted = f"{count:,} arrays"
    if is_one_type:
        counted = f"{count:,} x " * (count > 1) + _type_of(first)
    each = " each" if is_one_type and count > 1 else ""
    told = [first] if is_one_type else arrays
    whole = sum(array.bytes for array in told)
    held = sum(array.shard_bytes or 0 for array in told)
    text = f"{counted}, {size(whole)}{each}{layout}"
    if first.shard_bytes is None or held == whole:
        return text
    shape = f"{first.shard_shape}, " if is_one_type else ""
    return f"{text}; a device has {shape}{size(held)}{each}"


def _type_of(array: ArrayLayout) -> str:
    """Such as ``float32[8,64]``."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _layout(array: ArrayLayout, drawn: dict[str, str]) -> Iterator[Block]:
    """The spec and the picture of an array; each picture is drawn once."""
    if array.spec is None or array.spec.num_shards == 1:
        return
    yield paragraph(Code(array.spec), style="quiet")
    drawing = drawing_of_spec(array.spec, array.shape, array.devices)
    grids = drawing.grids()
    key = repr((grids.grids, grids.ways))
    if key in drawn and not grids.is_whole:
        yield paragraph("same picture as ", Code(drawn[key]), style="quiet")
    else:
        yield drawing
    drawn.setdefault(key, array.path)


def _table_of_arrays(arrays: Sequence[ArrayLayout]) -> Table:
    rows = (
        (
            Code(array.path),
            Code(_type_of(array)),
            size(array.bytes),
            _size(array.shard_bytes),
        )
        for array in arrays
    )
    return Table(("Array", "Type", "Bytes", "On a device"), tuple(map(Row, rows)))


def _total(counts: Iterable[float | None]) -> float | None:
    """The sum; None if one of the numbers is unknown."""
    known = [*counts]
    return None if None in known else sum(filter(None, known))


def _by_line(collectives: Sequence[Collective]) -> list[list[Collective]]:
    """Collectives by kind, axes and line, by the bytes that a device sends.

    Those with an unknown number of bytes come first.
    """
    groups: dict[Hashable, list[Collective]] = {}
    for each in collectives:
        key = (each.kind, each.operation, each.axes, each.group_size, each.source)
        groups.setdefault(key, []).append(each)

    def sent(group: Sequence[Collective]) -> float:
        total = _total(each.link_bytes for each in group)
        return math.inf if total is None else total

    return sorted(groups.values(), key=sent, reverse=True)


def _collectives(report: Report, said: set[str]) -> Iterator[Block]:
    if not report.collectives:
        return
    groups = _by_line(report.collectives)
    first, others = groups[:MOST_COLLECTIVES], groups[MOST_COLLECTIVES:]
    has_times = report.interconnect is not None
    yield _table(first, said, has_times)
    if others:
        lines = "line" if len(others) == 1 else "lines"
        title = f"{len(others):,} more {lines} of the program, which send less"
        yield Details(title, (_table(others, said, has_times),))
    if report.interconnect is not None and report.seconds:
        joined = report.interconnect
        text = (
            f"Together at least {duration(report.seconds)}, on {joined.name}: "
            f"{joined.bandwidth / 1e9:,.4g} GB/s from a device, "
            f"{duration(joined.latency)} a link ({joined.source})"
        )
        if report.network is not None:
            text += f"; {report.network_text}, {report.network.source}"
        yield paragraph(f"{text}.")


def _table(
    groups: Sequence[Sequence[Collective]], said: set[str], has_times: bool
) -> Table:
    titles = ["Collective", "Times", "Devices", "In, each", "Out, each", "Sent in all"]
    if has_times:
        titles.append("Time in all")
    rows = (_row(group, said, has_times) for group in groups)
    return Table(tuple(titles), tuple(rows))


def _row(group: Sequence[Collective], said: set[str], has_times: bool) -> Row:
    """The row of collectives of one kind, over the same axes, for one line."""
    first = group[0]
    is_one_size = len({(each.bytes_in, each.bytes_out) for each in group}) == 1
    at_most = "" if is_one_size else "<= "
    times = _total(each.count for each in group)
    seconds = _total(each.seconds for each in group)
    cells = [
        first.kind,
        "some" if times is None else f"{times:,}",
        UNKNOWN if first.group_size is None else f"{first.group_size:,}",
        at_most + size(max(each.bytes_in for each in group)),
        at_most + size(max(each.bytes_out for each in group)),
        _size(_total(each.link_bytes for each in group)),
    ]
    if has_times:
        cells.append(UNKNOWN if seconds is None else duration(seconds))
    types = dict.fromkeys(filter(None, (first.before, first.after)))
    operand = " -> ".join(types) if is_one_size else ""
    return Row(tuple(cells), tuple(_about(group, operand, said)))


def _about(
    group: Sequence[Collective], operand: str, said: set[str]
) -> Iterator[Paragraph]:
    """The operation, the line, the causes and the advice of a row."""
    first = group[0]
    over = "over " + ", ".join(map(repr, first.axes)) if first.axes else ""
    parts = [" ".join(filter(None, (first.operation, over))), operand]
    what: Inline = (", ".join(filter(None, parts)),)
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
    rows = [Row(("Memory at the peak", _size(cost.peak_bytes)), _parts(cost))]
    if not report.is_refused:
        operations = UNKNOWN if cost.flops is None else count(cost.flops)
        rows = [
            Row(("Floating point operations", operations)),
            Row(("Bytes read and written", _size(cost.bytes_accessed))),
            *rows,
        ]
    if cost.host_bytes is not None:
        rows.append(Row(("Memory of the host", size(cost.host_bytes))))
    yield Table(("", ""), tuple(rows))
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


def _parts(cost: Cost) -> tuple[Paragraph, ...]:
    parts = (
        ("arguments", cost.argument_bytes),
        ("results", cost.output_bytes),
        ("of these in the place of donated arguments", cost.donated_bytes or None),
        ("temporary", cost.temporary_bytes),
    )
    known = [f"{name} {size(value)}" for name, value in parts if value is not None]
    return (paragraph(", ".join(known)),) if known else ()


def _held(held: Held, times: int) -> Paragraph:
    text = f"{size(held.bytes)}: {held.type} of {held.operation}"
    text = f"{times:,} x {text}" if times > 1 else text
    if held.source is None:
        return paragraph(text)
    return paragraph(f"{text} at ", Code(held.source))


def _size(value: float | None) -> str:
    return UNKNOWN if value is None else size(round(value))
