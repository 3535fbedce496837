"""The record of a compiled program: XLA's ``HloModuleProto``, decoded.

The public ``as_text`` of a `jax.stages.Compiled` has the user's names among attributes,
from which a reader cannot tell them. The record has fields. No package that JAX needs
has classes for it: here are the wire format of protocol buffers, and the numbers of
fields in XLA's ``hlo.proto`` and ``xla_data.proto``.
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardmap._jax.hlo import DTYPES

Groups = list[tuple[int, ...]]
"""Devices that take part in a collective together."""


class Message:
    """A message of a protocol buffer, whose fields have numbers. Absent ones are 0."""

    def __init__(self, data: bytes = b"") -> None:
        self._fields: dict[int, list[Any]] = {}
        at = 0
        while at < len(data):
            key, at = _varint(data, at)
            kind = key & 7
            value: int | bytes
            if kind == 0:
                value, at = _varint(data, at)
            else:
                size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
                value = data[at : at + size]
                at += size
            self._fields.setdefault(key >> 3, []).append(value)

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def _of(self, number: int) -> list[Any]:
        return self._fields.get(number, [])

    def numbers(self, number: int) -> list[int]:
        """The numbers of a repeated field."""
        numbers: list[int] = []
        for value in self._of(number):
            if isinstance(value, int):
                numbers.append(value)
                continue
            at = 0
            while at < len(value):
                each, at = _varint(value, at)
                numbers.append(each)
        return [each - (1 << 64) if each >> 63 else each for each in numbers]

    def number(self, number: int) -> int:
        return (self.numbers(number) or [0])[-1]

    def data(self, number: int) -> bytes:
        return bytes((self._of(number) or [b""])[-1])

    def texts(self, number: int) -> list[str]:
        return [value.decode(errors="replace") for value in self._of(number)]

    def text(self, number: int) -> str:
        return (self.texts(number) or [""])[-1]

    def messages(self, number: int) -> list["Message"]:
        return [Message(value) for value in self._of(number)]

    def message(self, number: int) -> "Message":
        return Message(self.data(number))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number whose bytes have seven bits each, and the place after it."""
    value, shift = data[at] & 127, 7
    while data[at] > 127:
        at += 1
        value |= (data[at] & 127) << shift
        shift += 7
    return value, at + 1


class Shape:
    """The type of a value.

    Attributes:
      dtype: such as "f32"; "tuple" for several values.
      sizes: the dimensions of an array.
      parts: the values of a tuple.
    """

    def __init__(self, record: Message) -> None:
        self.dtype = DTYPES.get(record.number(2), "unknown")
        self.sizes = tuple(record.numbers(3))
        self.parts = [Shape(part) for part in record.messages(4)]

    def arrays(self) -> Iterator["Shape"]:
        """The arrays of a tuple; an array, alone."""
        if self.dtype != "tuple":
            yield self
        for part in self.parts:
            yield from part.arrays()

    @property
    def bits(self) -> int:
        """The size of an element, such as 8 of "f8e4m3fn"."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits[0]) if digits else 8 * (self.dtype == "pred")

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        each = [math.prod(array.sizes) * array.bits for array in self.arrays()]
        return sum(-(-bits // 8) for bits in each)

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


class Window(NamedTuple):
    """One dimension of the window of a convolution."""

    size: int
    stride: int
    low: int
    high: int
    dilation: int
    base_dilation: int


def _field(number: int, read: Any = Message.number) -> Any:
    return property(lambda instruction: read(instruction.record, number))


class Instruction:
    """An instruction.

    Attributes:
      record: its fields.
      name, opcode: XLA's names.
      op_name: JAX's name of its origin, such as ``jit(f)/dot_general``.
      frame: the number of its stack frame; 0 for none.
      computation: what it is part of.
      operands: the instructions whose results it uses.
      users: the instructions of the same computation that use its result.
      called: the computations that it calls: of a loop the body, then the condition.
      parameter: which parameter of its computation it is.
      index: the place in a tuple that a get-tuple-element takes.
      channel: a number that parts of one collective share.
      target: what a custom call calls.
      direction: what a comparison asks, such as "LT".
      is_host_transfer: whether it sends to the host, or receives from it.
    """

    parameter: int = _field(9)
    index: int = _field(13)
    channel: int = _field(26)
    target: str = _field(28, Message.text)
    direction: str = _field(63, Message.text)
    is_host_transfer: int = _field(47)

    def __init__(self, record: Message, computation: "Computation") -> None:
        self.record = record
        self.name, self.opcode = record.text(1), record.text(2)
        metadata = record.message(7)
        self.op_name, self.frame = metadata.text(2), metadata.number(15)
        self.computation = computation
        self.operands: list[Instruction] = []
        self.users: list[Instruction] = []
        self.called: list[Computation] = []

    @functools.cached_property
    def shape(self) -> Shape:
        """The type of its result."""
        return Shape(self.record.message(3))

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The configuration for the backend; empty if it is not JSON."""
        try:
            config = json.loads(self.record.data(43) or b"{}")
        except ValueError:  # Of a call by FFI.
            return {}
        return config if isinstance(config, dict) else {}

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """What the program and passes have noted."""
        pairs = self.record.message(68).messages(1)
        return {pair.text(1): pair.text(2) for pair in pairs}

    @property
    def is_root(self) -> bool:
        return self.computation.root is self

    @property
    def literal(self) -> int | None:
        """The value of a constant that is one integer, or a truth value."""
        literal = self.record.message(8)
        if Shape(literal.message(1)).sizes or self.opcode != "constant":
            return None
        for number in (2, 4, 5, 6, 7):  # pred, s32, s64, u32, u64
            if values := literal.numbers(number):
                return values[0]
        return int.from_bytes(literal.data(3)) if 3 in literal else None

    @property
    def contracted(self) -> list[int]:
        """The dimensions of the first operand that a dot sums over."""
        return self.record.message(30).numbers(1)

    @property
    def windows(self) -> list[Window]:
        """The window of a convolution, along each dimension."""
        dims = self.record.message(15).messages(1)
        return [Window(*(dim.number(k) for k in range(1, 7))) for dim in dims]

    @property
    def convolved(self) -> tuple[list[int], int, list[int]]:
        """The dimensions of a convolution.

        The spatial ones of the input, the one of the inputs of the kernel, and the
        spatial ones of the result.
        """
        dims = self.record.message(16)
        return dims.numbers(11), dims.number(3), dims.numbers(12)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The sender and the receiver of each part of a permutation."""
        pairs = self.record.messages(52)
        return [(pair.number(1), pair.number(2)) for pair in pairs]

    @property
    def group_axes(self) -> tuple[str, ...]:
        """The names of the axes along which its groups are, if XLA has them."""
        named = self.record.message(93)
        axes = named.message(1).messages(1)
        return tuple(axes[ref.number(1)].text(1) for ref in named.messages(2))

    @property
    def groups(self) -> Groups:
        """The groups of devices of a collective; [] for one of all devices.

        XLA has three forms: lists, numbers in a row that are reshaped and transposed,
        and axes of a mesh or parts of them.
        """
        if 93 in self.record:
            rows = _rows_of_mesh(self.record.message(93))
        elif 92 in self.record:
            iota = self.record.message(92)
            ids = _in_order(iota.numbers(3), iota.numbers(4))
            rows = ids.reshape(iota.number(1), iota.number(2))
        else:
            lists = self.record.message(87).messages(1)
            return [tuple(each.numbers(1)) for each in lists]
        return [tuple(row) for row in rows.tolist()]


def _in_order(shape: list[int], order: list[int]) -> np.ndarray:
    """Numbers from 0, reshaped and transposed."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(order or range(ids.ndim))


def _rows_of_mesh(named: Message) -> np.ndarray:
    mesh = named.message(1)
    sizes = [axis.number(2) for axis in mesh.messages(1)]
    ids = np.array(mesh.numbers(2) or range(math.prod(sizes)))
    if 3 in mesh:
        order = mesh.message(3)
        ids = _in_order(order.numbers(1), order.numbers(2))
    # A part of an axis has some devices before it, some itself, and some after it.
    parts = {axis: (size, 1) for axis, size in enumerate(sizes)}
    grouped = []
    for ref in named.messages(2):
        axis, part = ref.number(1), ref.message(2)
        parts[axis] = (part.number(1) or 1, part.number(2) or sizes[axis])
        grouped.append(3 * axis + 1)
    shape: list[int] = []
    for axis, (before, length) in parts.items():
        shape += [before, length, sizes[axis] // before // length]
    rest = [d for d in range(len(shape)) if d not in grouped]
    ids = ids.reshape(shape).transpose([*rest, *sorted(grouped)])
    return ids.reshape(-1, math.prod(ids.shape[len(rest) :]))


class Computation:
    """Some instructions, in the order in which they run, and those that call them."""

    root: Instruction

    def __init__(self, record: Message) -> None:
        self.name = record.text(1)
        self.instructions: list[Instruction] = []
        self.callers: list[Instruction] = []

    @property
    def parameters(self) -> list[Instruction]:
        return [each for each in self.instructions if each.opcode == "parameter"]

    @functools.cached_property
    def by_op_name(self) -> dict[str, list[Instruction]]:
        """The instructions, and those inside of fusions, by JAX's name."""
        named: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            named.setdefault(each.op_name, []).append(each)
            for part in each.called if each.opcode == "fusion" else ():
                for name, inside in part.by_op_name.items():
                    named.setdefault(name, []).extend(inside)
        return named


class Module:
    """A compiled program.

    Attributes:
      computations: all of them, each after those that it calls.
      entry: the computation that a call runs.
      by_id: the instructions, by XLA's numbers.
      num_devices: the number of devices that run it.
    """

    def __init__(self, data: bytes) -> None:
        record = Message(data)
        self._tables = record.message(17)
        self.num_devices = max(1, record.message(15).number(2))
        self.computations: list[Computation] = []
        self.by_id: dict[int, Instruction] = {}
        schedule = {
            pair.number(1): pair.message(2).numbers(1)
            for pair in record.message(7).messages(1)
        }
        by_number: dict[int, Computation] = {}
        for each in record.messages(3):
            computation = by_number[each.number(5)] = Computation(each)
            self.computations.append(computation)
            inside: dict[int, Instruction] = {}
            for fields in each.messages(2):
                inside[fields.number(35)] = instruction = Instruction(
                    fields, computation
                )
                instruction.called = [by_number[k] for k in fields.numbers(38)]
                for called in instruction.called:
                    called.callers.append(instruction)
            for instruction in inside.values():
                operands = instruction.record.numbers(36)
                instruction.operands = [inside[k] for k in operands]
                for operand in dict.fromkeys(instruction.operands):
                    operand.users.append(instruction)
            order = schedule.get(each.number(5), inside)
            computation.instructions = [inside[k] for k in order]
            computation.root = inside[each.number(6)]
            self.by_id |= inside
        self.entry = by_number[record.number(6)]

    @property
    def instructions(self) -> list[Instruction]:
        """All instructions."""
        return [each for c in self.computations for each in c.instructions]

    @functools.cached_property
    def _frames(self) -> list[tuple[int, int]]:
        """The location of each stack frame and the number of the frame around it."""
        return [(each.number(1), each.number(2)) for each in self._tables.messages(4)]

    @functools.cached_property
    def _places(self) -> list[tuple[str, int, str]]:
        files, functions = self._tables.texts(1), self._tables.texts(2)
        places = self._tables.messages(3)
        return [
            (files[each.number(1) - 1], each.number(3), functions[each.number(2) - 1])
            for each in places
        ]

    def place(self, frame: int) -> tuple[str, int, str]:
        """File, line and function of a stack frame."""
        return self._places[self._frames[frame - 1][0] - 1]

    def stack(self, frame: int) -> Iterator[int]:
        """A stack frame, then those around it."""
        while frame:
            yield frame
            frame = self._frames[frame - 1][1]
