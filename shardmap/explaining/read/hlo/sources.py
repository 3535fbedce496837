"""The lines of the user's program behind the instructions of a compiled one."""

import functools
import itertools
import re
from collections.abc import Callable

from shardmap.explaining.read.hlo.instructions import (
    MOVES,
    around,
    inside,
    is_generated,
    is_of_argument,
    parts_of,
    reached,
)
from shardmap.explaining.read.hlo.module import Instruction, Module
from shardmap.source import user_line

# The slices of a scan's operands, and slices in the body of a while loop. JAX traces
# those of a scan during lowering, once for all programs: their innermost line may be of
# another program.
_SLICES_OF_SCAN = re.compile(r"/while/body/jit\(dynamic_(?:update_)?index_in_dim\)/")


class Sources:
    """Finds the lines of a module's instructions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._lines: dict[int, str | None] = {}

    def of(self, instruction: Instruction) -> str | None:
        """The innermost line of the user's program for an instruction.

        An instruction that XLA added may have no line. Then this is the line of the
        nearest user of its result, or else of the nearest operand.
        """
        instruction = self.made_for(instruction)
        taken_by = self._nearest(instruction, _onward)
        return taken_by or self._nearest(instruction, _operands)

    def of_value(self, operand: Instruction, name: str | None) -> str | None:
        """The line of one of several values that XLA sends as one, if known."""
        line = self._nearest(operand, _operands)
        if name is None:
            return line
        there = self._by_op_name.get(name, set())
        if len(there) == 1:
            return next(iter(there))
        return line if line in there else None

    def made_for(self, instruction: Instruction) -> Instruction:
        """The instruction that needs a collective of the partitioner.

        From JAX 0.12 on, XLA names a collective that moves an operand after the origin
        of the operand. The first user that the partitioner did not add needs it.
        """
        is_of_maker = is_generated(instruction) or is_of_argument(instruction)
        if not is_of_maker or not instruction.opcode.startswith(MOVES):
            return instruction
        for each in reached(instruction, _onward):
            if not is_generated(each) and each.frame:
                return each
        return instruction

    @functools.cached_property
    def _by_op_name(self) -> dict[str, set[str]]:
        sources: dict[str, set[str]] = {}
        for each in self._module.instructions:
            if each.op_name and (source := self.line(each)) is not None:
                sources.setdefault(each.op_name, set()).add(source)
        return sources

    def _nearest(
        self,
        instruction: Instruction,
        onward: Callable[[Instruction], list[Instruction]],
    ) -> str | None:
        def further(each: Instruction) -> list[Instruction]:
            # The root of a fusion may have more metadata.
            return [*filter(lambda part: part.is_root, parts_of(each)), *onward(each)]

        return next(filter(None, map(self.line, reached(instruction, further))), None)

    def line(self, each: Instruction) -> str | None:
        """The line in the metadata of the instruction."""
        frame = each.frame
        if frame and _SLICES_OF_SCAN.search(each.op_name):
            frame = self._loop_of_slice(frame)
        if frame not in self._lines:
            stack = self._module.stack(frame)
            self._lines[frame] = user_line(map(self._module.place, stack))
        return self._lines[frame]

    def _loop_of_slice(self, frame: int) -> int:
        """The frame of the scan that a slice is part of; else the slice's own.

        The stack of such a slice repeats the line of the scan. A slice in the body of a
        `jax.lax.while_loop` has a line of its own.
        """
        place, stack = self._module.place, self._module.stack
        for within, loop in itertools.pairwise(stack(frame)):
            if loop in self._loop_frames:
                return loop if place(within) in map(place, stack(loop)) else frame
        return frame

    @functools.cached_property
    def _loop_frames(self) -> set[int]:
        return {e.frame for e in self._module.instructions if e.opcode == "while"}


def _operands(each: Instruction) -> list[Instruction]:
    return each.operands


def _onward(each: Instruction) -> list[Instruction]:
    """The users of a result, those inside fusions and loops first."""
    within: list[Instruction] = []
    for user in each.users:
        for part in inside(user, each):
            within += part.users
        if user.opcode == "tuple":
            places = [k for k, operand in enumerate(user.operands) if operand is each]
            within += _in_loops(user, places)
    outside = around(each) if each.is_root else None
    return [*within, *each.users, *([outside] if outside else [])]


def _in_loops(carried: Instruction, places: list[int]) -> list[Instruction]:
    """The users, in the bodies of loops, of some elements of a tuple."""
    users: list[Instruction] = []
    waiting = list(carried.users)
    for each in waiting:  # The list grows in the loop.
        if each.opcode not in ("call", "while"):
            continue
        for whole in each.called[0].parameters:
            if each.opcode == "call":
                waiting += whole.users
            for part in whole.users if each.opcode == "while" else ():
                if part.opcode == "get-tuple-element" and part.index in places:
                    users += _onward(part)
    return users
