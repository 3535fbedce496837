"""What is in the memory of a device at the peak, by the compiler's own record."""

import collections
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardmap._jax.hlo import Assignment, Buffer, Event, Instruction
from shardmap.explaining.read.hlo.instructions import operation_of
from shardmap.explaining.read.hlo.loops import origin
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.report import Held

MOST_HELD = 5
_NAMELESS = frozenset(
    "copy copy-start copy-done custom-call parameter while tuple bitcast".split()
)
"""Instructions that say little of what a value is."""


class Memory(NamedTuple):
    """The memory of a device.

    Attributes:
      peak: the bytes of all allocations; None if the compiler has no record.
      largest: the largest values at the peak, except arguments.
    """

    peak: int | None = None
    largest: tuple[Held, ...] = ()


def memory_of(assignment: Assignment | None, sources: Sources, platform: str) -> Memory:
    """The memory of a program.

    Args:
      assignment: the compiler's record of it, if there is one.
      sources: the lines of its instructions.
      platform: such as "tpu". TPUs have memories on the chip and of the host beside
        the main one; the numbers of those of GPUs are of parts of the main one.
    """
    if assignment is None:
        return Memory()
    there = [
        each for each in assignment.allocations if each.space == 0 or platform != "tpu"
    ]
    held = []
    for each in there:
        if not each.is_temporary and not each.is_parameter:
            buffers = [assignment.buffers[k] for k in each.buffers]
            largest = [buffer for buffer in buffers if buffer.size == each.size]
            held.append((each.size, largest))
    temporary = {k for each in there if each.is_temporary for k in each.buffers}
    for trace in assignment.traces:
        events = [each for each in trace if each.buffer in temporary]
        held += _alive(events, assignment.buffers)
    held.sort(key=lambda each: -each[0])
    told = [_held(size, buffers, sources) for size, buffers in held[:MOST_HELD]]
    return Memory(sum(each.size for each in there), tuple(filter(None, told)))


def _alive(
    events: Iterable[Event], buffers: dict[int, Buffer]
) -> Iterator[tuple[int, list[Buffer]]]:
    """The bytes of each place that is taken at the peak, and what is put there."""
    first: dict[int, int] = {}  # The buffer that took the place of each.
    sharing: collections.Counter[int] = collections.Counter()
    put: dict[int, list[Buffer]] = {}
    now = most = 0
    peak: dict[int, None] = {}
    for kind, number, other in events:
        place = first[number] = first.get(other if kind == 2 else number, number)
        size = buffers[place].size
        if kind == 1:
            sharing[place] -= 1
            now -= size if not sharing[place] else 0
            continue
        now += size if not sharing[place] else 0
        sharing[place] += 1
        put.setdefault(place, []).append(buffers[number])
        if now > most:
            most, peak = now, dict.fromkeys(k for k in sharing if sharing[k])
    for place in peak:
        yield buffers[place].size, put[place]


def _held(size: int, buffers: list[Buffer], sources: Sources) -> Held | None:
    """The value in a place, by the last of what is put there that has a name."""
    if not size or not buffers:
        return None
    buffer, maker = max(
        ((each, _maker(each)) for each in reversed(buffers)),
        key=lambda each: (each[1].opcode not in _NAMELESS) + bool(each[1].op_name),
    )
    shape = buffer.instruction.shape
    for place in buffer.path:
        shape = shape.parts[place]
    return Held(str(shape), size, operation_of(maker), sources.of(maker))


def _maker(buffer: Buffer) -> Instruction:
    """What makes a value; for an element of a loop's state, in its steps."""
    each, callers = buffer.instruction, buffer.instruction.computation.callers
    if each.opcode == "parameter" and callers and callers[0].opcode == "while":
        each = callers[0]
    if each.opcode != "while":
        return each
    each, _, calls = origin(each.called[0].root, buffer.path, ())
    if each.opcode == "dynamic-update-slice":  # Into the results of all steps.
        each, _, _ = origin(each.operands[1], (), calls)
    return each
