"""What is in the memory of a device at the peak, by the compiler's own record."""

import collections
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardmap.explaining.read.hlo.instructions import operation_of
from shardmap.explaining.read.hlo.loops import origin
from shardmap.explaining.read.hlo.module import Instruction, Message, Module
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


class Buffer(NamedTuple):
    """A value in memory.

    Attributes:
      size: its bytes.
      instruction, path: what defines it, and the place in the tuple.
    """

    size: int
    instruction: Instruction
    path: tuple[int, ...]


def memory_of(record: bytes, module: Module, sources: Sources, platform: str) -> Memory:
    """The memory of a program, by the ``HloProto`` of it, if there is one.

    TPUs have memories on the chip and of the host beside the main one; the numbers of
    those of GPUs are of parts of the main one.
    """
    if not record:
        return Memory()
    assignment = Message(record).message(3)
    buffers = {}
    for each in assignment.messages(1):
        place = each.message(3)
        instruction = module.by_id[place.number(4)]
        path = tuple(place.numbers(3))
        buffers[each.number(1)] = Buffer(each.number(2), instruction, path)
    peak, held, temporary = 0, [], set[int]()
    for each in assignment.messages(3):
        size, numbers = each.number(2), [part.number(1) for part in each.messages(9)]
        is_of_thread, space = each.number(3), each.number(8)
        if is_of_thread or (space and platform == "tpu"):
            continue
        peak += size
        is_parameter, is_result, is_constant = map(each.number, (5, 7, 12))
        if not (is_parameter or is_result or is_constant):
            temporary.update(numbers)
        elif not is_parameter:
            whole = [buffers[k] for k in numbers if buffers[k].size == size]
            held.append((size, whole))
    for trace in assignment.messages(4):
        events = [(e.number(1), e.number(2), e.number(5)) for e in trace.messages(1)]
        held += _alive([each for each in events if each[1] in temporary], buffers)
    held.sort(key=lambda each: -each[0])
    told = [_held(size, there, sources) for size, there in held[:MOST_HELD]]
    return Memory(peak, tuple(filter(None, told)))


def _alive(
    events: Iterable[tuple[int, int, int]], buffers: dict[int, Buffer]
) -> Iterator[tuple[int, list[Buffer]]]:
    """The bytes of each place that is taken at the peak, and what is put there.

    Args:
      events: what happens, the buffer, and another one. 0: it is allocated, 1: freed,
        2: put into the place of the other.
      buffers: by number.
    """
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
