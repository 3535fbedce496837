"""What an explanation sums up: arrays by layout, collectives by line, and a verdict."""

import collections
import dataclasses
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardmap.explain.report import ArrayLayout, Collective, Held, Report
from shardmap.units import size


class Arrays(NamedTuple):
    """Arrays that are told of together, as they lie in the same way."""

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


def by_prefix(arrays: Sequence[ArrayLayout]) -> list[Arrays]:
    """Arrays by role, prefix and layout, in the order of the first of each."""
    found: dict[tuple[str, str, str], list[ArrayLayout]] = {}
    for array in arrays:
        prefix = re.split(r"[\[.]", array.path, maxsplit=1)[0]
        found.setdefault((prefix, array.role, array.layout), []).append(array)
    return [
        Arrays(prefix if len(those) > 1 else those[0].path, tuple(those))
        for (prefix, _, _), those in found.items()
    ]


def alike(arrays: Sequence[ArrayLayout]) -> list[Arrays]:
    """Arrays that differ in their path and role only, in the order of the first."""
    found: dict[ArrayLayout, list[ArrayLayout]] = {}
    for array in arrays:
        key = dataclasses.replace(array, path="", role="input")
        found.setdefault(key, []).append(array)
    return [
        Arrays(", ".join(array.path for array in those), tuple(those))
        for those in found.values()
    ]


class Sends(NamedTuple):
    """Collectives of one kind, over the same axes, for one line of the program.

    Attributes:
      first: one of them, which stands for what they share.
      times: how often they run, together; None if that is not known of one.
      bytes_in, bytes_out: each time; the most of any.
      same: whether all have the same bytes.
      link_bytes, seconds: of all; None if they are not known of one.
      messages: how many XLA makes of them, as it may send several as one.
      causes, advice: why they are there and what avoids it, each once.
    """

    first: Collective
    times: int | None
    bytes_in: int
    bytes_out: int
    same: bool
    link_bytes: int | None
    seconds: float | None
    messages: float
    causes: tuple[str, ...]
    advice: tuple[str, ...]


def groups_of_collectives(collectives: Sequence[Collective]) -> list[Sends]:
    """Collectives by kind, axes and line, in the order of the first of each."""
    found: dict[Hashable, list[Collective]] = {}
    for each in collectives:
        key = (each.kind, each.operation, each.axes, each.group_size, each.source)
        found.setdefault(key, []).append(each)
    groups = []
    for those in found.values():
        counts = [each.count for each in those]
        sent = [each.link_bytes for each in those]
        times = [each.seconds for each in those]
        groups.append(
            Sends(
                those[0],
                None if None in counts else sum(filter(None, counts)),
                max(each.bytes_in for each in those),
                max(each.bytes_out for each in those),
                len({(each.bytes_in, each.bytes_out) for each in those}) == 1,
                None if None in sent else sum(filter(None, sent)),
                None if None in times else sum(filter(None, times)),
                sum((each.count or 1) / each.together for each in those),
                _each_once(each.cause for each in those),
                _each_once(each.advice for each in those),
            )
        )
    return groups


def operand(sends: Sends) -> str:
    """What a device has before and after, if no cause says it, and all are alike."""
    before, after = sends.first.before, sends.first.after
    if not sends.same or before is None or after is None:
        return ""
    if any(before in cause for cause in sends.causes):
        return ""
    return before if before == after else f"{before} -> {after}"


def _each_once(texts: Iterable[str | None]) -> tuple[str, ...]:
    """Texts that begin differently; what is behind a colon is an example."""
    found: dict[str, str] = {}
    for text in filter(None, texts):
        found.setdefault(text.partition(": ")[0], text)
    return tuple(found.values())


def most_sent(groups: Sequence[Sends], most: int) -> list[Sends]:
    """Those in which a device sends most, in their order; the unknown may be large."""

    def sent(place: int) -> float:
        link_bytes = groups[place].link_bytes
        return math.inf if link_bytes is None else link_bytes

    places = sorted(range(len(groups)), key=sent, reverse=True)[:most]
    return [groups[place] for place in sorted(places)]


def counted(values: Sequence[Held]) -> list[tuple[Held, str]]:
    """Each once, with how often it is there: "", or such as ``3 x ``."""
    counts = collections.Counter(values)
    return [(each, f"{n} x " if n > 1 else "") for each, n in counts.items()]


def verdict(report: Report) -> list[str]:
    """What runs in parallel, what it waits for, what it holds, what to change first.

    The last has the first remark, which is not to be said again.
    """
    return [_parallel(report), _waits(report), *_holds(report), *_first(report)]


def _first(report: Report) -> Iterator[str]:
    for remark in report.remarks[:1]:
        where = f" [{remark.source}]" if remark.source else ""
        yield f"Change first: {remark.text}.{where} {remark.advice}"


def _parallel(report: Report) -> str:
    cut = [axis for axis in report.axes if axis.devices > 1 and not axis.is_repeated]
    if not cut:
        if report.num_devices == 1:
            there = f" of {report.available:,}" if (report.available or 1) > 1 else ""
            return f"One program on one device{there}: no axis is laid on several."
        return f"No axis is cut: each of {report.num_devices:,} devices does the same."
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


def _waits(report: Report) -> str:
    if not report.collectives:
        return "Nothing moves between devices."
    groups = groups_of_collectives(report.collectives)
    count = sum(group.times or 0 for group in groups)
    all_known = all(group.times is not None for group in groups)
    messages = round(sum(group.messages for group in groups))
    as_one = f", sent as {messages:,}" if all_known and count > messages else ""
    many = f"{count:,} collective{'s' * (count != 1)} a call{as_one}"
    if not all_known:
        # Those of a loop whose length only the running program knows.
        many = (
            f"{many}, and some in each step of a loop"
            if count
            else ("some collectives in each step of a loop")
        )
    sent = sum(group.link_bytes or 0 for group in groups)
    least = "" if all_known else "at least "
    if sent or all_known:
        many += f", in which a device sends {least}{size(sent)}"
    (most,) = most_sent(groups, 1)
    place = f" for {most.first.source}" if most.first.source else ""
    return f"Between devices: {many}; most by {most.first.kind}{place}."


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
