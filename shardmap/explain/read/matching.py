"""The collectives of a program, next to those that the compiler made of them."""

import collections
import dataclasses
from collections.abc import Sequence

from shardmap.explain.counts import total
from shardmap.explain.interconnect import Interconnect, sent_bytes
from shardmap.explain.read.collectives import Sent
from shardmap.explain.read.hlo.collectives import CompiledCollective
from shardmap.explain.report import Collective
from shardmap.map.collectives.table import COLLECTIVES


def _function(operation: str) -> str | None:
    """For what XLA calls an operation of JAX, the function that binds it."""
    names = (each.name for q, each in COLLECTIVES.items() if q.name == operation)
    return next(names, None)


def reported(
    sent: Sequence[Sent],
    by_xla: Sequence[CompiledCollective] | None,
    wires: Interconnect | None,
) -> tuple[tuple[Collective, ...], list[str]]:
    """The collectives of both, each once, and what differs, in sentences.

    Where the compiler sends other bytes, or another number of times, than the program
    says, the numbers are the compiler's.

    Args:
      sent: those of the program.
      by_xla: those of the compiled program; None if there is none.
      wires: what times are estimated for.
    """
    matches, others = _matched(sent, by_xla or ())
    found: list[Collective] = []
    for each, those in zip(sent, matches, strict=True):
        if not those:
            found.append(_of_program(each, wires, None if by_xla is None else False))
        # Copies of one operation, such as those of an unrolled loop, are one line.
        sizes: dict[tuple[int, int], list[CompiledCollective]] = {}
        for other in those:
            sizes.setdefault((other.bytes_in, other.bytes_out), []).append(other)
        found += [_of_both(each, copies, wires) for copies in sizes.values()]
    found += [_of_compiler(other, wires) for other in others]
    notes = [] if by_xla is None else _differences(sent, matches, by_xla)
    return tuple(found), notes


def _matched(
    sent: Sequence[Sent], by_xla: Sequence[CompiledCollective]
) -> tuple[list[list[CompiledCollective]], list[CompiledCollective]]:
    """For each of the program's the compiled ones, and those that are left."""
    left = list(by_xla)
    matches: list[list[CompiledCollective]] = [[] for _ in sent]
    # Whoever agrees in everything comes first.
    for fits in (_all, _all_but_count, _all_but_source, *_LOOSER):
        for each, those in zip(sent, matches, strict=True):
            for other in left if not those else ():
                if _same_group(each, other) and fits(each, other):
                    those.append(other)
                    left.remove(other)
                    break
    for each, those in zip(sent, matches, strict=True):
        for other in list(left):
            if _same_group(each, other) and _is_copy(each, those, other):
                those.append(other)
                left.remove(other)
    return matches, left


def _same_group(each: Sent, other: CompiledCollective) -> bool:
    # A permutation may leave devices out.
    return each.kind == other.kind and (
        each.kind == "collective-permute" or each.group_size == other.group_size
    )


def _all(each: Sent, other: CompiledCollective) -> bool:
    return _all_but_count(each, other) and each.count == other.count


def _all_but_count(each: Sent, other: CompiledCollective) -> bool:
    return _same_line(each, other) and _same_bytes(each, other)


def _all_but_source(each: Sent, other: CompiledCollective) -> bool:
    return _same_operation(each, other) and _same_bytes(each, other)


def _same_line(each: Sent, other: CompiledCollective) -> bool:
    return each.source == other.source and _same_operation(each, other)


def _same_operation(each: Sent, other: CompiledCollective) -> bool:
    """Whether it may be of that operation.

    Of several values that XLA sends as one it says only where one of them is from, and
    what a map makes of an operation is of the line of the map.
    """
    merged = other.together > other.bytes_in
    return each.operation in map(_function, other.operations) and (
        merged
        or each.in_map
        or other.source is None
        or each.source in (None, other.source)
    )


def _same_bytes(each: Sent, other: CompiledCollective) -> bool:
    return each.bytes_in == other.bytes_in


def _free(each: Sent, other: CompiledCollective) -> bool:
    """For those of which XLA does not say, or cannot say, where they are from."""
    is_free = each.by_partitioner or not other.operations
    return is_free and each.bytes_in == other.bytes_in


def _partitioned(each: Sent, other: CompiledCollective) -> bool:
    """The partitioner may do it in its own way."""
    return each.by_partitioner


_LOOSER = (_same_line, _same_operation, _free, _partitioned)


def _is_copy(
    each: Sent, those: Sequence[CompiledCollective], other: CompiledCollective
) -> bool:
    """Whether a loop that XLA unrolled explains one more of the same."""
    if not those or not _all_but_source(each, other):
        return False
    together = total([copy.count for copy in (*those, other)])
    if each.count is None or together is None:
        return each.count is None
    return together <= each.count


def _of_program(
    each: Sent, wires: Interconnect | None, in_compiled: bool | None
) -> Collective:
    """One that only the program has."""
    seconds, link_bytes = _costs(each, each.count, each.bytes_in, wires)
    return Collective(
        kind=each.kind,
        operation=each.operation,
        axes=each.axes,
        group_size=each.group_size,
        count=each.count,
        bytes_in=each.bytes_in,
        bytes_out=each.bytes_out,
        source=each.source,
        added_by_partitioner=False,
        in_compiled=in_compiled,
        seconds=seconds,
        link_bytes=link_bytes,
        before=each.before or None,
        after=each.after or None,
    )


def _of_both(
    each: Sent, copies: Sequence[CompiledCollective], wires: Interconnect | None
) -> Collective:
    """One of the program, as the compiler does it."""
    count = _count(each, copies)
    first = copies[0]
    seconds, link_bytes = _costs(first, count, first.together, wires)
    return dataclasses.replace(
        _of_program(each, wires, True),
        count=count,
        bytes_in=first.bytes_in,
        bytes_out=first.bytes_out,
        source=each.source or first.source,
        seconds=seconds,
        link_bytes=link_bytes,
        together=first.values,
        before=first.before or None,
        after=first.after or None,
    )


def _count(each: Sent, copies: Sequence[CompiledCollective]) -> int | None:
    """How often it runs: XLA may know it of a while loop, or not of a scan."""
    together = total([copy.count for copy in copies])
    return each.count if together is None else together


def _of_compiler(other: CompiledCollective, wires: Interconnect | None) -> Collective:
    """One that is nowhere in the program, or not so."""
    seconds, link_bytes = _costs(other, other.count, other.together, wires)
    operations = list(map(_function, other.operations))
    operation = operations[0] if len(operations) == 1 else None
    return Collective(
        kind=other.kind,
        operation=operation,
        axes=other.axes,
        group_size=other.group_size,
        count=other.count,
        bytes_in=other.bytes_in,
        bytes_out=other.bytes_out,
        source=other.source,
        added_by_partitioner=operation is None,
        cause=other.cause.text if operation is None and other.cause else None,
        advice=other.cause.advice if operation is None and other.cause else None,
        in_compiled=True,
        seconds=seconds,
        link_bytes=link_bytes,
        together=other.values,
        before=other.before or None,
        after=other.after or None,
    )


def _costs(
    each: Sent | CompiledCollective,
    count: int | None,
    together: int,
    wires: Interconnect | None,
) -> tuple[float | None, int | None]:
    """Seconds and bytes; values that are sent as one share the time of that."""
    if count is None:
        return None, None
    link_bytes = count * sent_bytes(each.kind, each.bytes_in, each.group_size)
    if wires is None:
        return None, link_bytes
    share = each.bytes_in / together if together else 1.0
    return count * share * wires.time(each.kind, together, each.group_size), link_bytes


def _differences(
    sent: Sequence[Sent],
    matches: Sequence[list[CompiledCollective]],
    by_xla: Sequence[CompiledCollective],
) -> list[str]:
    notes = []
    gone = matches.count([])
    if gone:
        notes.append(
            f"{_collectives(gone)} in the program and not in the compiled one: XLA "
            "removed, merged or replaced what it did not need."
        )
    for each, those in zip(sent, matches, strict=True):
        if not those or each.by_partitioner:
            continue
        for number in sorted({m.bytes_in for m in those} - {each.bytes_in}):
            notes.append(
                f"XLA sends {number:,} bytes for a {each.operation} of "
                f"{each.bytes_in:,}: it changed the shape or the type."
            )
        count = _count(each, those)
        if None not in (count, each.count) and count != each.count:
            notes.append(
                f"XLA does a {each.operation} {count:,} times, where the program says "
                f"{each.count:,}: it was moved out of a loop, or shared."
            )
    together = collections.Counter(each.instruction for each in by_xla)
    numbers = collections.Counter(count for count in together.values() if count > 1)
    if numbers:
        parts = ", ".join(
            f"{count}" + (f" ({often:,} times)" if often > 1 else "")
            for count, often in sorted(numbers.items())
        )
        notes.append(f"XLA sends {parts} of the collectives as one.")
    return notes


def _collectives(count: int) -> str:
    return "1 collective is" if count == 1 else f"{count} collectives are"
