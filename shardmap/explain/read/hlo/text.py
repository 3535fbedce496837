"""XLA's text of a compiled program, as instructions in computations."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

from shardmap.explain.counts import times
from shardmap.explain.read.hlo import frames
from shardmap.explain.read.hlo.names import merged_names

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
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_INDEX = re.compile(r"\bindex=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
# The slices of what a scan goes over, and such in the body of a while loop. JAX traces
# those of a scan while it lowers, once for all programs: their innermost line may be of
# another one.
_SLICES_OF_SCAN = re.compile(r"/while/body/jit\(dynamic_(?:update_)?index_in_dim\)/")
_MOVES = re.compile("all-gather|all-to-all|collective-permute")
_BITS = re.compile(r"^[a-z]+?(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name, opcode: as XLA calls it.
      type: of its result, such as ``f32[4]{0}``.
      is_root: whether its result is that of the computation.
      line: all of it.
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
        """Of all arrays in the result."""
        return sum(nbytes(*each) for each in self.shapes)

    @property
    def op_name(self) -> str:
        """What JAX calls where it comes from, such as ``jit(f)/dot_general``."""
        found = _OP_NAME.search(self.line)
        return found[1] if found else ""

    @property
    def operation(self) -> str:
        """What it is of, such as ``dot_general``; of several that are one, its own."""
        if merged_names(self.op_name):
            return self.opcode
        return self.op_name.rsplit("/", 1)[-1] or self.opcode

    @property
    def is_generated(self) -> bool:
        """Whether the partitioner put it in, where XLA says so."""
        return 'is_spmd_generated="true"' in self.line

    @property
    def is_of_argument(self) -> bool:
        """Whether it has the name of an argument, and not of an operation."""
        return bool(self.op_name) and "/" not in self.op_name

    @property
    def frame(self) -> int | None:
        """Where its line is in the tables of the program."""
        found = _FRAME.search(self.line)
        return int(found[1]) if found else None

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it takes results of."""
        start = self.line.index(f" {self.opcode}(") + len(self.opcode) + 2
        depth = 1
        for end in range(start, len(self.line)):
            depth += {"(": 1, ")": -1}.get(self.line[end], 0)
            if not depth:
                break
        return re.findall(r"%([\w.\-]+)", self.line[start:end])

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls, each with how, such as "body"."""
        return [
            (found["how"], name.strip())
            for found in _CALLED.finditer(self.line)
            for name in found["names"].replace("%", "").split(",")
        ]

    @property
    def trips(self) -> int | None:
        """How many steps a loop has; None if XLA does not know."""
        found = _TRIPS.search(self.line)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      text: XLA's.
      computations: the instructions of each, in the order in which they run.
      entry: the name of the one that a call runs.
      num_devices: how many devices run it.
    """

    text: str
    computations: dict[str, list[Instruction]]
    entry: str
    num_devices: int

    @functools.cached_property
    def _frames(self) -> frames.Frames:
        return frames.Frames(self.text)

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        """Who takes the result of each instruction. Names are those of the module."""
        users: dict[str, list[Instruction]] = {}
        for instructions in self.computations.values():
            for each in instructions:
                for name in each.operands:
                    users.setdefault(name, []).append(each)
        return users

    def users_of(self, each: Instruction) -> list[Instruction]:
        """What takes the result of an instruction, in its own computation."""
        return self._users.get(each.name, [])

    def operands_of(self, each: Instruction) -> list[Instruction]:
        """The instructions whose results it takes."""
        return [self._by_name[name] for name in each.operands if name in self._by_name]

    def made_for(self, instruction: Instruction) -> Instruction:
        """What an instruction of the partitioner is for.

        From JAX 0.12 on XLA says of what moves an operand only where that is from: it
        is for the first that takes it and is not of the partitioner itself.
        """
        is_of_maker = instruction.is_generated or instruction.is_of_argument
        if not is_of_maker or not _MOVES.match(instruction.opcode):
            return instruction
        found, seen = [instruction], {instruction.name}
        for each in found:  # It grows meanwhile.
            if not each.is_generated and each.frame is not None:
                return each
            for user in self._onward(each):
                if user.name not in seen:
                    seen.add(user.name)
                    found.append(user)
        return instruction

    def source_of(self, instruction: Instruction) -> str | None:
        """The innermost line of the user's program that an instruction is for.

        Where XLA does not say it of what it put in, that is the line of what takes the
        result, or else of what makes the operands.
        """
        instruction = self.made_for(instruction)
        return self._nearest(instruction, self._taken_by) or self._nearest(
            instruction, self._made_by
        )

    def source_of_value(
        self, instruction: Instruction, name: str, place: int
    ) -> str | None:
        """The line of one of the values that XLA sends as one, if it says it elsewhere.

        Args:
          instruction: what sends them.
          name: what JAX calls where the value comes from.
          place: which of the operands it is.
        """
        there = self._sources_by_name.get(name, set())
        if len(there) == 1:
            return next(iter(there))
        operands = self.operands_of(instruction)[place : place + 1]
        made = [self._nearest(each, self._made_by) for each in operands]
        return next((each for each in made if each in there), None)

    @functools.cached_property
    def _sources_by_name(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for each in self._by_name.values():
            if each.op_name and (source := self._own_source(each)) is not None:
                found.setdefault(each.op_name, set()).add(source)
        return found

    def _nearest(
        self,
        instruction: Instruction,
        onward: Callable[[Instruction], list[Instruction]],
    ) -> str | None:
        found, seen = [instruction], {instruction.name}
        for each in found:  # It grows meanwhile.
            source = self._own_source(each)
            if source is not None:
                return source
            for other in onward(each):
                if other.name not in seen:
                    seen.add(other.name)
                    found.append(other)
        return None

    def _own_source(self, each: Instruction) -> str | None:
        """The line that XLA says of it."""
        frame = each.frame
        if frame is not None and _SLICES_OF_SCAN.search(each.op_name):
            frame = self._loop_of_slice(frame)
        return None if frame is None else self._frames.source(frame)

    def _loop_of_slice(self, frame: int) -> int:
        """The frame of the scan that a slice is of; the slice's own in other loops.

        What a scan does for itself is of the lines that lead to it, once more; what
        stands in the body of a `jax.lax.while_loop` is of a line of its own.
        """
        inside = frame
        for around in self._frames.stack(frame):
            if around in self._loop_frames:
                places = map(self._frames.place, self._frames.stack(around))
                return around if self._frames.place(inside) in places else frame
            inside = around
        return frame

    @functools.cached_property
    def _loop_frames(self) -> set[int | None]:
        return {each.frame for each in self._by_name.values() if each.opcode == "while"}

    def _taken_by(self, each: Instruction) -> list[Instruction]:
        return [*self._inside(each), *self._onward(each)]

    def _onward(self, each: Instruction) -> list[Instruction]:
        """What takes its result, first what does so inside of fusions and loops."""
        users = self.users_of(each)
        inside: list[Instruction] = []
        for user in users:
            if user.opcode == "fusion":
                for part in self.parameters_of(user, each):
                    inside += self.users_of(part)
            elif user.opcode == "tuple":
                inside += self._in_loops(user, _places(user, each))
        return [*inside, *users]

    def _in_loops(self, carried: Instruction, places: list[int]) -> list[Instruction]:
        """What takes some of what a tuple brings into the bodies of loops."""
        found: list[Instruction] = []
        waiting = list(self.users_of(carried))
        for each in waiting:  # It grows meanwhile.
            bodies = [c for how, c in each.called if how in ("body", "to_apply")]
            inside = [i for name in bodies for i in self.computations[name]]
            wholes = {i.name for i in inside if i.opcode == "parameter"}
            if each.opcode == "call":
                waiting += [i for i in inside if wholes & {*i.operands}]
            elif each.opcode == "while":
                for part in inside:
                    index = _INDEX.search(part.line)
                    if index and int(index[1]) in places and wholes & {*part.operands}:
                        found += self._onward(part)
        return found

    def parameters_of(
        self, fusion: Instruction, operand: Instruction
    ) -> list[Instruction]:
        """What stands for an operand in a fusion."""
        wanted = {f" parameter({place})" for place in _places(fusion, operand)}
        inside = self.parts_of(fusion)
        return [each for each in inside if any(text in each.line for text in wanted)]

    def _made_by(self, each: Instruction) -> list[Instruction]:
        return [*self._inside(each), *self.operands_of(each)]

    def _inside(self, each: Instruction) -> list[Instruction]:
        """The root of a fusion, which XLA may say more of than of the fusion."""
        return [part for part in self.parts_of(each) if part.is_root]

    def parts_of(self, each: Instruction) -> list[Instruction]:
        """What is inside a fusion; [] for anything else."""
        called = each.called if each.opcode == "fusion" else []
        return [part for _, name in called for part in self.computations[name]]

    @functools.cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {
            each.name: each
            for instructions in self.computations.values()
            for each in instructions
        }

    def runs(self) -> Iterator[tuple[Instruction, int | None]]:
        """All that a call runs, with how often; None: XLA does not know."""
        return self._runs(self.entry, 1)

    def _runs(
        self, name: str, count: int | None
    ) -> Iterator[tuple[Instruction, int | None]]:
        for instruction in self.computations.get(name, ()):
            yield instruction, count
            for how, inner in instruction.called:
                is_loop = how in ("body", "condition")
                often = times(count, instruction.trips) if is_loop else count
                yield from self._runs(inner, often)


def _places(user: Instruction, made: Instruction) -> list[int]:
    """Which of its operands a result is."""
    return [k for k, name in enumerate(user.operands) if name == made.name]


def module_of(text: str) -> Module:
    """Reads what ``as_text()`` of a `jax.stages.Compiled` gives."""
    partitions = re.search(r"num_partitions=(\d+)", text)
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif current and (found := _INSTRUCTION.match(line)):
            computations[current].append(
                Instruction(
                    found["name"],
                    found["opcode"],
                    found["type"],
                    bool(found["root"]),
                    line,
                )
            )
    num_devices = int(partitions[1]) if partitions else 1
    return Module(text, computations, entry, num_devices)


def shapes_in(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a type.

    >>> shapes_in("(f32[2,3]{1,0}, u32[])")
    [('f32', (2, 3)), ('u32', ())]
    """
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(type_)
    ]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of an array in bytes.

    >>> nbytes("bf16", (3,)), nbytes("pred", ()), nbytes("token", ())
    (6, 1, 0)
    """
    bits = _BITS.match(dtype)
    width = 8 if dtype == "pred" else int(bits[1]) if bits else 0
    return -(-math.prod(shape) * width // 8)
