"""One value that goes between devices, however it is found."""

import dataclasses
from collections.abc import Sequence, Set

from shardmap.explain.interconnect import Interconnect, sent_bytes
from shardmap.explain.read.hlo.causes import Cause
from shardmap.explain.report import Collective, Remark
from shardmap.units import size


@dataclasses.dataclass(frozen=True)
class Sent:
    """A value that each device of a group sends.

    Attributes:
      kind: as XLA calls it.
      operation: the function of `jax.lax`; None if the compiler put it in.
      axes: the named axes; () if they are not known.
      group_size: how many devices are in a group.
      count: how often it runs; None if only the running program knows.
      bytes_in, bytes_out: of one device, each time.
      source: the line of the program.
      before, after: what a device has of it, such as ``f32[4]``; "" if unknown.
      together: the bytes that a device puts into the instruction that sends it.
      values: how many values this instruction sends.
      cause: why the compiler put it in, if it did.
    """

    kind: str
    operation: str | None
    axes: tuple[str, ...]
    group_size: int
    count: int | None
    bytes_in: int
    bytes_out: int
    source: str | None
    before: str
    after: str
    together: int
    values: int = 1
    cause: Cause | None = None


def collective(sent: Sent, wires: Interconnect | None) -> Collective:
    """The collective of a report, with its bytes and its time on an interconnect.

    Values that one instruction sends share its time by their bytes.
    """
    link_bytes = seconds = None
    if sent.count is not None:
        of_one = sent_bytes(sent.kind, sent.bytes_in, sent.group_size)
        link_bytes = sent.count * of_one
        if wires is not None:
            share = sent.bytes_in / sent.together if sent.together else 1.0
            time = wires.time(sent.kind, sent.together, sent.group_size)
            seconds = sent.count * share * time
    return Collective(
        kind=sent.kind,
        operation=sent.operation,
        axes=sent.axes,
        group_size=sent.group_size,
        count=sent.count,
        bytes_in=sent.bytes_in,
        bytes_out=sent.bytes_out,
        source=sent.source,
        added_by_partitioner=sent.operation is None,
        seconds=seconds,
        link_bytes=link_bytes,
        cause=sent.cause.text if sent.cause else None,
        advice=sent.cause.advice if sent.cause else None,
        together=sent.values,
        before=sent.before or None,
        after=sent.after or None,
    )


def missing(
    program: Set[tuple[str, str | None]], compiled: Sequence[Sent]
) -> list[str]:
    """A note on how many collectives of a program the compiler did not keep.

    Args:
      program: their operations and lines.
      compiled: what was compiled.
    """
    count = len(program - {(each.operation, each.source) for each in compiled})
    if not count:
        return []
    them = "1 collective" if count == 1 else f"{count:,} collectives"
    return [f"XLA removed, merged or replaced {them} of the program."]


def rematerialised(sent: Sequence[Sent]) -> list[Remark]:
    """A remark for each line with arrays that are made whole only to be cut anew."""
    found: dict[str | None, Remark] = {}
    for each in sent:
        cause = each.cause
        if cause is not None and cause.is_rematerialised and cause.advice:
            text = f"{cause.text}, {size(each.bytes_out)} on each"
            found.setdefault(each.source, Remark(text, cause.advice, each.source))
    return list(found.values())
