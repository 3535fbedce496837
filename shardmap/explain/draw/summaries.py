"""What an explanation sums up: arrays by layout, collectives by line, and a verdict."""

import collections
import dataclasses
import math
import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

from shardmap.explain.report import ArrayLayout, Collective, Held, Report
from shardmap.units import size

Number = TypeVar("Number", int, float)


def _total(counts: Sequence[Number | None]) -> Number | None:
    """The sum; None if one of the numbers is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


class ArrayGroup(NamedTuple):
    """Arrays with the same layout."""

    name: str
    arrays: tuple[ArrayLayout, ...]

    @property
    def description(self) -> str:
        """Such as ``67 arrays, 1.3 MiB, replicated on 8 devices``."""
        first, count = self.arrays[0], len(self.arrays)
        is_one_type = len({(array.dtype, array.shape) for array in self.arrays}) == 1
        counted = f"{count:,} arrays"
        if is_one_type:
            counted = f"{count:,} x " * (count > 1) + type_of(first)
        each = " each" if is_one_type and count > 1 else ""
        told = [first] if is_one_type else self.arrays
        whole = sum(array.bytes for array in told)
        held = sum(array.shard_bytes or 0 for array in told)
        text = f"{counted}, {size(whole)}{each}, {first.layout}"
        if first.shard_bytes is None or held == whole:
            return text
        shape = f"{first.shard_shape}, " if is_one_type else ""
        return f"{text}; a device has {shape}{size(held)}{each}"


def type_of(array: ArrayLayout) -> str:
    """Such as ``float32[8,64]``."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def by_prefix(arrays: Sequence[ArrayLayout]) -> list[ArrayGroup]:
    """Arrays by role, prefix and layout, in the order of the first of each."""
    found: dict[tuple[str, str, str], list[ArrayLayout]] = {}
    for array in arrays:
        prefix = re.split(r"[\[.]", array.path, maxsplit=1)[0]
        found.setdefault((prefix, array.role, array.layout), []).append(array)
    return [
        ArrayGroup(prefix if len(those) > 1 else those[0].path, tuple(those))
        for (prefix, _, _), those in found.items()
    ]


def alike(arrays: Sequence[ArrayLayout]) -> list[ArrayGroup]:
    """Arrays that differ in their path and role only, in the order of the first."""
    found: dict[ArrayLayout, list[ArrayLayout]] = {}
    for array in arrays:
        key = dataclasses.replace(array, path="", role="input")
        found.setdefault(key, []).append(array)
    return [
        ArrayGroup(", ".join(array.path for array in those), tuple(those))
        for those in found.values()
    ]


class CollectiveGroup(NamedTuple):
    """Collectives of one kind, over the same axes, for one line of the program."""

    members: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        """One of them, for what they have in common."""
        return self.members[0]

    @property
    def times(self) -> int | None:
        """How often they run in one call; None if that is not known of one."""
        return _total([each.count for each in self.members])

    @property
    def link_bytes(self) -> int | None:
        """What a device sends in all of them; None if it is not known of one."""
        return _total([each.link_bytes for each in self.members])

    @property
    def seconds(self) -> float | None:
        """The estimated time of all of them; None if it is not known of one."""
        return _total([each.seconds for each in self.members])

    @property
    def is_one_size(self) -> bool:
        """Whether all have the same bytes."""
        return len({(each.bytes_in, each.bytes_out) for each in self.members}) == 1

    @property
    def causes(self) -> tuple[str, ...]:
        """Why they are there; what is behind a colon is an example."""
        causes: dict[str, str] = {}
        for cause in [each.cause for each in self.members if each.cause]:
            causes.setdefault(cause.partition(": ")[0], cause)
        return tuple(causes.values())

    @property
    def advice(self) -> tuple[str, ...]:
        """What avoids them, each once."""
        return tuple(dict.fromkeys(each.advice for each in self.members if each.advice))

    @property
    def operand(self) -> str:
        """What a device has before and after, if all are alike and no cause says it."""
        before, after = self.first.before, self.first.after
        if not self.is_one_size or before is None or after is None:
            return ""
        if any(before in cause for cause in self.causes):
            return ""
        return before if before == after else f"{before} -> {after}"


def by_line(collectives: Sequence[Collective]) -> list[CollectiveGroup]:
    """Collectives by kind, axes and line: first those in which a device sends most.

    Those of which it is not known may send the most.
    """
    found: dict[Hashable, list[Collective]] = {}
    for each in collectives:
        key = (each.kind, each.operation, each.axes, each.group_size, each.source)
        found.setdefault(key, []).append(each)
    groups = [CollectiveGroup(tuple(members)) for members in found.values()]

    def sent(group: CollectiveGroup) -> float:
        return math.inf if group.link_bytes is None else group.link_bytes

    return sorted(groups, key=sent, reverse=True)


def counted(values: Sequence[Held]) -> list[tuple[Held, str]]:
    """Each once, with how often it is there: "", or such as ``3 x ``."""
    counts = collections.Counter(values)
    return [(each, f"{n} x " if n > 1 else "") for each, n in counts.items()]


def verdict(report: Report) -> list[str]:
    """What runs in parallel, what moves between devices, what they hold."""
    return [_parallel(report), _waits(report), *_holds(report)]


def _parallel(report: Report) -> str:
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
        return f"No axis is cut: each of {report.num_devices:,} devices does the same."
    there = f" of {report.available:,}" if (report.available or 1) > 1 else ""
    return f"One program on one device{there}: no axis is laid on several."


def _waits(report: Report) -> str:
    if not report.collectives:
        return "Nothing moves between devices."
    groups = by_line(report.collectives)
    many = _how_many(report.collectives)
    sent = sum(group.link_bytes or 0 for group in groups)
    all_known = all(each.count is not None for each in report.collectives)
    if sent or all_known:
        least = "" if all_known else "at least "
        many += f", in which a device sends {least}{size(sent)}"
    most = groups[0].first
    place = f" for {most.source}" if most.source else ""
    return f"Between devices: {many}; most by {most.kind}{place}."


def _how_many(collectives: Sequence[Collective]) -> str:
    """Those of a loop whose length only the running program knows are not counted."""
    known = [(each.count, each.together) for each in collectives if each.count]
    count = sum(times for times, _ in known)
    many = f"{count:,} collective{'s' * (count != 1)} a call"
    if any(each.count is None for each in collectives):
        some = "in each step of a loop"
        return f"{many}, and some {some}" if count else f"some collectives {some}"
    messages = round(sum(times / together for times, together in known))
    return f"{many}, sent as {messages:,}" if messages < count else many


def _holds(report: Report) -> list[str]:
    cost = report.cost
    if cost is None or cost.peak_bytes is None:
        return []
    parts = {
        "arguments": cost.argument_bytes or 0,
        "results": (cost.output_bytes or 0) - (cost.donated_bytes or 0),
        "temporary values": cost.temporary_bytes or 0,
    }
    most = max(parts, key=lambda part: parts[part])
    return [f"Memory on a device: {size(cost.peak_bytes)}, most of it {most}."]
