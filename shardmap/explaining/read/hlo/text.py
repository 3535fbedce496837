"""XLA's text of a compiled program, as instructions in computations."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(?.*?) "
    r"(?P<opcode>[a-z][\w\-]*)\("
)
_CALLED = re.compile(
    r"\b(?P<how>body|condition|calls|to_apply|true_computation|false_computation|"
    r"branch_computations|called_computations)="
    r"\{?(?P<names>%?[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r" constant\((-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
# A type as in `f32[2,3]{1,0:T(8,128)S(1)}`; without a space, it is the main memory.
_ARRAY = re.compile(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
HOST = 5
"""The number of the host's memory in a layout, as in ``S(5)``."""
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_BITS = re.compile(r"^[a-z]+?(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name, opcode: XLA's names.
      type: the type of its result, such as ``f32[4]{0}``.
      is_root: whether its result is the result of the computation.
      line: the whole line.
    """

    name: str
    opcode: str
    type: str
    is_root: bool
    line: str

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and the dimensions of each array in the result."""
        return shapes_in(self.type)

    @property
    def bytes(self) -> int:
        """The size of all arrays in the result."""
        return sum(nbytes(*each) for each in self.shapes)

    @property
    def result_type(self) -> str:
        """The type of its result alone.

        The type of an instruction that starts something has its operands and perhaps
        flags, too: ``((operands), results, flags)``. A copy has the result first. An
        all-reduce of XLA for older JAX has only results.
        """
        if not self.opcode.endswith("-start"):
            return self.type
        parts = elements_of(self.type)
        if self.opcode == "copy-start":
            return parts[0]
        are_flat = self.opcode in ("all-gather-start", "collective-permute-start")
        return parts[1] if are_flat or parts[0].startswith("(") else self.type

    @property
    def op_name(self) -> str:
        """JAX's name of its origin, such as ``jit(f)/dot_general``."""
        match = _OP_NAME.search(self.line)
        return match[1] if match else ""

    @property
    def operation(self) -> str:
        """The JAX operation, such as ``dot_general``; else the opcode."""
        opcode = self.opcode.removesuffix("-start")
        if merged_names(self.op_name):
            return opcode
        return self.op_name.rsplit("/", 1)[-1] or opcode

    @property
    def is_generated(self) -> bool:
        """Whether XLA marks it as added by the partitioner."""
        return 'is_spmd_generated="true"' in self.line

    @property
    def is_of_argument(self) -> bool:
        """Whether it is named after an argument, not an operation."""
        return bool(self.op_name) and "/" not in self.op_name

    @property
    def frame(self) -> int | None:
        """The number of its stack frame in the tables of the module."""
        match = _FRAME.search(self.line)
        return int(match[1]) if match else None

    @property
    def operands(self) -> list[str]:
        """The names of the instructions whose results it uses."""
        start = self.line.index(f" {self.opcode}(") + len(self.opcode) + 2
        depth = 1
        for end in range(start, len(self.line)):
            depth += {"(": 1, ")": -1}.get(self.line[end], 0)
            if not depth:
                break
        return re.findall(r"%([\w.\-]+)", self.line[start:end])

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls, each with its role, such as "body"."""
        return [
            (match["how"], name.strip())
            for match in _CALLED.finditer(self.line)
            for name in match["names"].replace("%", "").split(",")
        ]

    @property
    def is_fusion(self) -> bool:
        """Whether it stands for instructions that are one kernel."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def index(self) -> int | None:
        """The place in a tuple that a get-tuple-element takes."""
        match = _INDEX.search(self.line)
        return int(match[1]) if match and self.opcode == "get-tuple-element" else None

    def places_of(self, operand: "Instruction") -> list[int]:
        """The positions of ``operand`` among its operands."""
        return [k for k, name in enumerate(self.operands) if name == operand.name]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      text: XLA's text.
      computations: the instructions of each computation, in the order in which they
        run.
      entry: the name of the computation that a call runs.
      num_devices: the number of devices that run it.
    """

    text: str
    computations: dict[str, list[Instruction]]
    entry: str
    num_devices: int

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """All instructions. Names are unique in a module."""
        return {
            each.name: each
            for instructions in self.computations.values()
            for each in instructions
        }

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for each in self.by_name.values():
            for name in each.operands:
                users.setdefault(name, []).append(each)
        return users

    def users_of(self, each: Instruction) -> list[Instruction]:
        """The instructions of the same computation that use its result."""
        return self._users.get(each.name, [])

    def operands_of(self, each: Instruction) -> list[Instruction]:
        """The instructions whose results it uses."""
        return [self.by_name[name] for name in each.operands if name in self.by_name]

    def parts_of(self, each: Instruction) -> list[Instruction]:
        """The instructions inside a fusion; [] for anything else."""
        called = each.called if each.is_fusion else []
        return [part for _, name in called for part in self.computations[name]]

    @functools.cached_property
    def _fusions(self) -> dict[str, Instruction]:
        return {
            part.name: each
            for each in self.by_name.values()
            for part in self.parts_of(each)
        }

    def fusion_of(self, each: Instruction) -> Instruction | None:
        """The fusion that it is part of, if any."""
        return self._fusions.get(each.name)

    def parameters_of(
        self, fusion: Instruction, operand: Instruction
    ) -> list[Instruction]:
        """The parameters that stand for an operand inside a fusion."""
        wanted = {f" parameter({place})" for place in fusion.places_of(operand)}
        inside = self.parts_of(fusion)
        return [each for each in inside if any(text in each.line for text in wanted)]

    @functools.cached_property
    def is_for_tpu(self) -> bool:
        """Whether XLA for TPU made it: only its layouts have tiles."""
        return ":T(" in self.text

    def trips(self, loop: Instruction) -> int | None:
        """The number of steps of a loop; None if the text does not say.

        XLA for TPU does not write it down. It is known from a counter that starts at a
        constant, has a constant added in each step, and is compared with a constant.
        """
        return self._trips[loop.name]

    @functools.cached_property
    def _trips(self) -> dict[str, int | None]:
        loops = [each for each in self.by_name.values() if each.opcode == "while"]
        return {each.name: self._steps_of(each) for each in loops}

    def _steps_of(self, loop: Instruction) -> int | None:
        match = _TRIPS.search(loop.line)
        return int(match[1]) if match else self._counted(loop)

    def _counted(self, loop: Instruction) -> int | None:
        called = dict(loop.called)
        if not {"condition", "body"} <= {*called}:
            return None
        test = self._root_of(called["condition"])
        compared = self.operands_of(test)
        if test.opcode != "compare" or "direction=LT" not in test.line:
            return None
        if len(compared) != 2 or (place := compared[0].index) is None:
            return None
        [carried], after = self.operands_of(loop), self._root_of(called["body"])
        if carried.opcode != "tuple" or after.opcode != "tuple":
            return None
        start = self._constant(self.by_name.get(carried.operands[place]))
        end = self._constant(compared[1])
        step = None
        more = self.by_name.get(after.operands[place])
        if more is not None and more.opcode == "add":
            before, added = self.operands_of(more)
            step = self._constant(added) if before.index == place else None
        if start is None or end is None or step is None or step < 1:
            return None
        return max(0, -(-(end - start) // step))

    def _root_of(self, name: str) -> Instruction:
        return next(each for each in self.computations[name] if each.is_root)

    def _constant(self, each: Instruction | None) -> int | None:
        """The value of a constant, perhaps copied; None for anything else."""
        while each is not None and each.opcode == "copy":
            each = next(iter(self.operands_of(each)), None)
        match = None if each is None else _CONSTANT.search(each.line)
        return int(match[1]) if match else None

    def runs(self) -> Iterator[tuple[Instruction, int | None]]:
        """The instructions that a call runs and how often; None if unknown."""
        return self._runs(self.entry, 1)

    def _runs(
        self, name: str, count: int | None
    ) -> Iterator[tuple[Instruction, int | None]]:
        for each in self.computations.get(name, ()):
            yield each, count
            for how, inner in each.called:
                steps = self.trips(each) if how in ("body", "condition") else 1
                often = None if count is None or steps is None else count * steps
                yield from self._runs(inner, often)


def reached(
    start: Instruction, onward: Callable[[Instruction], list[Instruction]]
) -> Iterator[Instruction]:
    """An instruction and those that ``onward`` leads to, breadth first."""
    waiting, seen = [start], {start.name}
    for each in waiting:  # The list grows in the loop.
        yield each
        new = [other for other in onward(each) if other.name not in seen]
        seen.update(other.name for other in new)
        waiting += new


def module_of(text: str) -> Module:
    """Reads the text that ``as_text()`` of a `jax.stages.Compiled` returns."""
    partitions = re.search(r"num_partitions=(\d+)", text)
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            computations[current].append(
                Instruction(
                    match["name"],
                    match["opcode"],
                    match["type"],
                    bool(match["root"]),
                    line,
                )
            )
    num_devices = int(partitions[1]) if partitions else 1
    return Module(text, computations, entry, num_devices)


def arrays_in(type_: str) -> list[tuple[str, int]]:
    """The arrays of a type, each with the number of its memory, 0 for the main one.

    >>> arrays_in("(f32[2,3]{1,0:T(8,128)S(5)}, u32[])")
    [('f32[2,3]{1,0:T(8,128)S(5)}', 5), ('u32[]', 0)]
    """
    arrays = _ARRAY.findall(type_)
    spaces = [_SPACE.search(each) for each in arrays]
    return [
        (each, int(space[1]) if space else 0)
        for each, space in zip(arrays, spaces, strict=True)
    ]


def shapes_in(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a type.

    >>> shapes_in("(f32[2,3]{1,0}, u32[])")
    [('f32', (2, 3)), ('u32', ())]
    """
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(type_)
    ]


def elements_of(type_: str) -> list[str]:
    """The types in a tuple; a type that is no tuple, alone.

    >>> elements_of("((f32[2,3]{1,0}), f32[8]{0}, u32[])")
    ['(f32[2,3]{1,0})', 'f32[8]{0}', 'u32[]']
    >>> elements_of("f32[8]{0:T(8,128)}")
    ['f32[8]{0:T(8,128)}']
    """
    if not type_.startswith("("):
        return [type_]
    types, depth, start = [], 0, 1
    for end, character in enumerate(type_):
        depth += (character in "([{") - (character in ")]}")
        if (depth == 1 and character == ",") or depth == 0:
            types.append(type_[start:end].strip())
            start = end + 1
    return types


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of an array in bytes.

    >>> nbytes("bf16", (3,)), nbytes("pred", ()), nbytes("token", ())
    (6, 1, 0)
    """
    bits = _BITS.match(dtype)
    width = 8 if dtype == "pred" else int(bits[1]) if bits else 0
    return -(-math.prod(shape) * width // 8)


def merged_names(op_name: str) -> list[str]:
    """The names of the operations that XLA merged into one; [] for a single one.

    >>> merged_names("jit(f)/(jvp(g)/dot_general:a/reduce_sum)")
    ['jit(f)/jvp(g)/dot_general', 'jit(f)/a/reduce_sum']
    >>> merged_names("jit(f)/transpose(jvp(g))")
    []
    """
    depth, start, ends = 0, len(op_name), [len(op_name) - 1]
    while start > 0 and op_name.endswith(")"):
        start -= 1
        depth += {")": 1, "(": -1}.get(op_name[start], 0)
        if depth == 0:
            break
        if depth == 1 and op_name[start] == ":":
            ends.append(start)
    if len(ends) == 1 or op_name[start - 1 : start] not in ("", "/"):
        return []
    starts = [start, *reversed(ends[1:])]
    return [
        op_name[:start] + op_name[first + 1 : last]
        for first, last in zip(starts, reversed(ends), strict=True)
    ]


def types(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Some arrays, such as ``f32[2,3] and 2 pieces of s32[4]``."""
    counts = collections.Counter(
        f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in shapes
    )
    return " and ".join(
        type_ if count == 1 else f"{count:,} pieces of {type_}"
        for type_, count in counts.items()
    )
