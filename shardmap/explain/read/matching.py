"""The collectives of a program, next to those that the compiler made of them."""

import collections
from collections.abc import Sequence

from shardmap._jax.collectives import ALL_COLLECTIVES
from shardmap.explain.interconnect import Interconnect, sent_bytes
from shardmap.explain.read.collectives import Sent
from shardmap.explain.read.hlo import Compiled
from shardmap.explain.report import Collective

_FUNCTIONS = {primitive.name: each.name for primitive, each in ALL_COLLECTIVES.items()}
"""For what XLA calls the operations of JAX, their functions in `jax.lax`."""


def reported(
    sent: Sequence[Sent],
    by_xla: Sequence[Compiled] | None,
    wires: Interconnect | None,
) -> tuple[tuple[Collective, ...], list[str]]:
    """The collectives of both, each once, and what differs, in sentences.

    Where the compiler sends other bytes than the program says, the bytes are the
    compiler's.

    Args:
      sent: those of the program.
      by_xla: those of the compiled program; None if there is none.
      wires: what times are estimated for.
    """
    matches, others = _matched(sent, by_xla or ())
    found = [
        _collective(
            each,
            each if match is None else match,
            wires,
            None if by_xla is None else match is not None,
        )
        for each, match in zip(sent, matches, strict=True)
    ]
    operations = {each.operation for each in sent}
    found += [
        _collective(None, other, wires, True)
        for other in others
        # Else it is a copy of one of the program's, as an unrolled loop makes.
        if _FUNCTIONS.get(other.operation) not in operations
    ]
    notes = [] if by_xla is None else _differences(sent, matches)
    return tuple(found), notes


def _matched(
    sent: Sequence[Sent], by_xla: Sequence[Compiled]
) -> tuple[list[Compiled | None], list[Compiled]]:
    """For each of the program's the compiled one, and those that are left."""
    left = list(by_xla)
    matches: list[Compiled | None] = [None] * len(sent)
    # Whoever agrees in everything comes first.
    for fits in (_all, _same_operation, _same_bytes, _partitioned):
        for number, each in enumerate(sent):
            for other in left if matches[number] is None else ():
                if _same_group(each, other) and fits(each, other):
                    matches[number] = other
                    left.remove(other)
                    break
    return matches, left


def _same_group(each: Sent, other: Compiled) -> bool:
    # A permutation may leave devices out.
    return each.kind == other.kind and (
        each.kind == "collective-permute" or each.group_size == other.group_size
    )


def _all(each: Sent, other: Compiled) -> bool:
    return _same_operation(each, other) and each.bytes_in == other.bytes_in


def _same_operation(each: Sent, other: Compiled) -> bool:
    return each.operation == _FUNCTIONS.get(other.operation)


def _same_bytes(each: Sent, other: Compiled) -> bool:
    """For those of which XLA does not say, or cannot say, where they are from."""
    is_free = each.by_partitioner or not other.operation
    return is_free and each.bytes_in == other.bytes_in


def _partitioned(each: Sent, other: Compiled) -> bool:
    """The partitioner may do it in its own way."""
    return each.by_partitioner


def _collective(
    each: Sent | None,
    bytes_of: Sent | Compiled,
    wires: Interconnect | None,
    in_compiled: bool | None,
) -> Collective:
    """One of the program's, or None and one that only the compiler has."""
    origin = each or bytes_of
    kind, group_size, bytes_in = bytes_of.kind, origin.group_size, bytes_of.bytes_in
    # XLA may know how many steps a while loop has.
    count = bytes_of.count if origin.count is None else origin.count
    seconds = link_bytes = None
    if count is not None:
        link_bytes = count * sent_bytes(kind, bytes_in, group_size)
        if wires is not None:
            seconds = count * wires.time(kind, bytes_in, group_size)
    return Collective(
        kind=kind,
        operation=None if each is None else each.operation,
        axes=() if each is None else each.axes,
        group_size=group_size,
        count=count,
        bytes_in=bytes_in,
        bytes_out=bytes_of.bytes_out,
        source=None if each is None else each.source,
        added_by_partitioner=each is None,
        in_compiled=in_compiled,
        seconds=seconds,
        link_bytes=link_bytes,
    )


def _differences(sent: Sequence[Sent], matches: Sequence[Compiled | None]) -> list[str]:
    notes = []
    gone = matches.count(None)
    if gone:
        notes.append(
            f"{_collectives(gone)} in the program and not in the compiled one: XLA "
            "removed, merged or replaced what it did not need."
        )
    for each, match in zip(sent, matches, strict=True):
        if match is not None and not each.by_partitioner:
            if match.bytes_in != each.bytes_in:
                notes.append(
                    f"XLA sends {match.bytes_in:,} bytes for a {each.operation} of "
                    f"{each.bytes_in:,}: it changed the shape or the type."
                )
    together = collections.Counter(m.instruction for m in matches if m is not None)
    for count in together.values():
        if count > 1:
            notes.append(f"XLA sends {count} of the collectives as one.")
    return notes


def _collectives(count: int) -> str:
    return "1 collective is" if count == 1 else f"{count} collectives are"
