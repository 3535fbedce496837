"""How often the instructions of a compiled program run in one call."""

from collections.abc import Iterator
from typing import NamedTuple

from shardmap.explaining.read.hlo.module import Computation, Instruction

_PASSED = frozenset(
    "copy copy-start copy-done convert bitcast reshape broadcast".split()
)
"""Instructions whose result has the value of their operand."""
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}

_Path = tuple[int, ...]
"""The places in nested tuples."""
_Calls = tuple[Instruction, ...]
"""The calls that were entered, the innermost last."""


class _Element(NamedTuple):
    """A part of a parameter of a computation, and a constant."""

    parameter: Instruction
    path: _Path
    plus: int


def runs(
    computation: Computation, count: int | None = 1
) -> Iterator[tuple[Instruction, int | None]]:
    """The instructions that a call runs and how often; None if unknown."""
    for each in computation.instructions:
        yield each, count
        often = count
        if each.opcode == "while":
            steps = steps_of(each)
            often = None if count is None or steps is None else count * steps
        for called in each.called:
            yield from runs(called, often)


def steps_of(loop: Instruction) -> int | None:
    """The number of steps of a loop; None if the running program alone knows.

    XLA for TPU does not write it down. It is known from a counter that starts at a
    constant, has a constant added in each step, and is compared with a constant.
    """
    known = loop.config.get("known_trip_count")
    return _counted(loop) if known is None else int(known["n"])


def _counted(loop: Instruction) -> int | None:
    body, condition = loop.called
    test, _, calls = origin(condition.root, (), ())
    if test.opcode != "compare":
        return None
    sides = [_value(operand, (), calls) for operand in test.operands]
    ends = [_known(side) for side in sides]
    direction = test.direction
    if ends[1] is None:
        sides.reverse()
        ends.reverse()
        direction = _FLIPPED.get(direction, direction)
    counter, end = sides[0], ends[1]
    if not isinstance(counter, _Element) or end is None:
        return None
    start = _known(_value(loop.operands[0], counter.path, ()))
    after = _value(body.root, counter.path, ())
    if start is None or not isinstance(after, _Element) or after.path != counter.path:
        return None
    step, left = after.plus, end - start - counter.plus
    if direction in ("LE", "GE"):
        left += 1 if direction == "LE" else -1
    if step * {"LT": 1, "LE": 1, "GT": -1, "GE": -1}.get(direction, 0) > 0:
        return max(0, -(-left // step))
    is_met = direction == "NE" and step and left % step == 0 and left // step >= 0
    return left // step if is_met else None


def _known(value: int | _Element | None) -> int | None:
    """A value, if each run has the same."""
    if not isinstance(value, _Element):
        return value
    caller, operand = given(value.parameter)
    if operand is None or (caller.opcode == "while" and not _keeps(caller, value.path)):
        return None
    before = _known(_value(operand, value.path, ()))
    return None if before is None else before + value.plus


def given(parameter: Instruction) -> tuple[Instruction, Instruction | None]:
    """The only call of a computation, and what it gives for a parameter; or None."""
    callers = parameter.computation.callers
    if len(callers) != 1:
        return parameter, None
    caller, place = callers[0], parameter.parameter
    if caller.opcode == "conditional":
        place = 1 + caller.called.index(parameter.computation)
    return caller, caller.operands[place]


def _keeps(loop: Instruction, path: _Path) -> bool:
    """Whether the steps of a loop leave a part of its state as it is."""
    (state,) = loop.called[0].parameters
    return origin(loop.called[0].root, path, ()) == (state, path, ())


def _value(each: Instruction, path: _Path, calls: _Calls) -> int | _Element | None:
    """The value of a part of a result: a constant, or one that is given plus one."""
    each, path, calls = origin(each, path, calls)
    if each.opcode == "constant":
        return each.literal
    if each.opcode == "parameter":
        return _Element(each, path, 0)
    if each.opcode not in ("add", "subtract"):
        return None
    first, second = each.operands
    added = _constant(second, calls)
    if added is None and each.opcode == "add":
        first, added = second, _constant(first, calls)
    before = _value(first, (), calls)
    if added is None or before is None:
        return None
    added = added if each.opcode == "add" else -added
    if isinstance(before, int):
        return before + added
    return before._replace(plus=before.plus + added)


def _constant(each: Instruction, calls: _Calls) -> int | None:
    return origin(each, (), calls)[0].literal


def origin(
    each: Instruction, path: _Path, calls: _Calls, passed: frozenset[str] = _PASSED
) -> tuple[Instruction, _Path, _Calls]:
    """The instruction that computes a part of a result, behind what passes it on.

    Args:
      each, path: the instruction, and the places of the part in its result.
      calls: the calls that were entered.
      passed: the opcodes of what passes its operand on; of custom calls, those that
        XLA for TPU adds.
    """
    while True:
        is_of_program = each.opcode == "custom-call" and bool(each.op_name)
        if each.opcode in passed and each.operands and not is_of_program:
            if path and len(each.operands) > 1:
                each, path = each.operands[path[0]], path[1:]
            else:
                each = each.operands[0]
        elif each.opcode == "get-tuple-element":
            each, path = each.operands[0], (each.index, *path)
        elif each.opcode == "tuple" and path:
            each, path = each.operands[path[0]], path[1:]
        elif each.opcode in ("fusion", "call", "async-start"):
            each, calls = each.called[0].root, (*calls, each)
        elif each.opcode == "parameter" and calls:
            each, calls = calls[-1].operands[each.parameter], calls[:-1]
        elif each.opcode == "while" and _keeps(each, path):
            each = each.operands[0]
        else:
            return each, path, calls
