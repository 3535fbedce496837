"""The lines of the user's program behind the instructions of a compiled one."""

import functools
import re
from collections.abc import Callable, Iterator

from shardmap.explaining.read.hlo.text import Instruction, Module, reached
from shardmap.source import user_line

_MOVES = re.compile("all-gather|all-to-all|collective-permute")
# The slices of a scan's operands, and slices in the body of a while loop. JAX traces
# those of a scan during lowering, once for all programs: their innermost line may be of
# another program.
_SLICES_OF_SCAN = re.compile(r"/while/body/jit\(dynamic_(?:update_)?index_in_dim\)/")


class Sources:
    """Finds the lines of a module's instructions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._frames = _Frames(module.text)

    def of(self, instruction: Instruction) -> str | None:
        """The innermost line of the user's program for an instruction.

        An instruction that XLA added may have no line. Then this is the line of the
        nearest user of its result, or else of the nearest operand.
        """
        instruction = self.made_for(instruction)
        return self._nearest(instruction, self._taken_by) or self._nearest(
            instruction, self._made_by
        )

    def of_value(self, instruction: Instruction, name: str, place: int) -> str | None:
        """The line of one of several values that XLA sends as one, if known.

        Args:
          instruction: the instruction that sends them.
          name: JAX's name of the origin of the value.
          place: the number of the operand.
        """
        there = self._by_op_name.get(name, set())
        if len(there) == 1:
            return next(iter(there))
        operands = self._module.operands_of(instruction)[place : place + 1]
        lines = [self._nearest(each, self._made_by) for each in operands]
        return next((each for each in lines if each in there), None)

    def made_for(self, instruction: Instruction) -> Instruction:
        """The instruction that needs a collective of the partitioner.

        From JAX 0.12 on, XLA names a collective that moves an operand after the origin
        of the operand. The first user that the partitioner did not add needs it.
        """
        is_of_maker = instruction.is_generated or instruction.is_of_argument
        if not is_of_maker or not _MOVES.match(instruction.opcode):
            return instruction
        for each in reached(instruction, self._onward):
            if not each.is_generated and each.frame is not None:
                return each
        return instruction

    @functools.cached_property
    def _by_op_name(self) -> dict[str, set[str]]:
        sources: dict[str, set[str]] = {}
        for each in self._module.by_name.values():
            if each.op_name and (source := self._own(each)) is not None:
                sources.setdefault(each.op_name, set()).add(source)
        return sources

    def _nearest(
        self,
        instruction: Instruction,
        onward: Callable[[Instruction], list[Instruction]],
    ) -> str | None:
        return next(filter(None, map(self._own, reached(instruction, onward))), None)

    def _own(self, each: Instruction) -> str | None:
        """The line in the metadata of the instruction."""
        frame = each.frame
        if frame is not None and _SLICES_OF_SCAN.search(each.op_name):
            frame = self._loop_of_slice(frame)
        return None if frame is None else self._frames.source(frame)

    def _loop_of_slice(self, frame: int) -> int:
        """The frame of the scan that a slice is part of; else the slice's own.

        The stack of such a slice repeats the line of the scan. A slice in the body of a
        `jax.lax.while_loop` has a line of its own.
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
        instructions = self._module.by_name.values()
        return {each.frame for each in instructions if each.opcode == "while"}

    def _taken_by(self, each: Instruction) -> list[Instruction]:
        return [*self._root_of(each), *self._onward(each)]

    def _made_by(self, each: Instruction) -> list[Instruction]:
        return [*self._root_of(each), *self._module.operands_of(each)]

    def _root_of(self, each: Instruction) -> list[Instruction]:
        """The root of a fusion; it may have more metadata."""
        return [part for part in self._module.parts_of(each) if part.is_root]

    def _onward(self, each: Instruction) -> list[Instruction]:
        """The users of a result, those inside fusions and loops first."""
        users = self._module.users_of(each)
        inside: list[Instruction] = []
        for user in users:
            if user.is_fusion:
                for part in self._module.parameters_of(user, each):
                    inside += self._module.users_of(part)
            elif user.opcode == "tuple":
                inside += self._in_loops(user, user.places_of(each))
        return [*inside, *users]

    def _in_loops(self, carried: Instruction, places: list[int]) -> list[Instruction]:
        """The users, in the bodies of loops, of some elements of a tuple."""
        users: list[Instruction] = []
        waiting = list(self._module.users_of(carried))
        for each in waiting:  # The list grows in the loop.
            bodies = [c for how, c in each.called if how in ("body", "to_apply")]
            inside = [i for name in bodies for i in self._module.computations[name]]
            wholes = {i.name for i in inside if i.opcode == "parameter"}
            if each.opcode == "call":
                waiting += [i for i in inside if wholes & {*i.operands}]
            elif each.opcode == "while":
                for part in inside:
                    if part.index in places and wholes & {*part.operands}:
                        users += self._onward(part)
        return users


class _Frames:
    """The stack frames of a module's text.

    There are four tables: files, functions, locations in both, and frames. A frame is a
    location and the frame around it. Each row begins with its number.
    """

    def __init__(self, text: str) -> None:
        self._files = _names(text, "FileNames")
        self._functions = _names(text, "FunctionNames")
        self._places = _fields(text, "FileLocations")
        self._frames = _fields(text, "StackFrames")

    def source(self, frame: int) -> str | None:
        """The innermost line of the user's program around a frame."""
        return user_line(map(self.place, self.stack(frame)))

    def place(self, frame: int) -> tuple[str, int, str]:
        """File, line and function of a frame."""
        place = self._places.get(self._frames[frame]["file_location_id"], {})
        return (
            self._files.get(place.get("file_name_id", 0), ""),
            place.get("line", 0),
            self._functions.get(place.get("function_name_id", 0), ""),
        )

    def stack(self, frame: int) -> Iterator[int]:
        """The frame, then those around it."""
        while fields := self._frames.get(frame):
            yield frame
            # Zero stands for none; all others are one too high.
            around = fields.get("parent_frame_id", 0) - 1
            if around >= frame:
                return
            frame = around


def _rows(text: str, table: str) -> Iterator[tuple[int, str]]:
    match = re.search(rf"^{table}\n((?:\d.*\n)*)", text, re.MULTILINE)
    for row in match[1].splitlines() if match else ():
        number, _, rest = row.partition(" ")
        yield int(number), rest


def _names(text: str, table: str) -> dict[int, str]:
    return {number: rest[1:-1] for number, rest in _rows(text, table)}


def _fields(text: str, table: str) -> dict[int, dict[str, int]]:
    return {
        number: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", rest)}
        for number, rest in _rows(text, table)
    }
