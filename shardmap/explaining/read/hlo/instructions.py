"""What the instructions of a compiled program are, and what is around them."""

import collections
from collections.abc import Callable, Iterable, Iterator

from shardmap.explaining.read.hlo.module import Instruction, Shape

MOVES = ("all-gather", "all-to-all", "collective-permute")
SUMS = ("all-reduce", "reduce-scatter")
"""Collectives that move values, and that add them up."""
AROUND = ("fusion", "async-start")
"""Instructions that stand for those of a computation: one kernel, or one operation."""


def operation_of(each: Instruction) -> str:
    """The JAX operation, such as ``dot_general``; else the opcode."""
    opcode = each.opcode.removesuffix("-start")
    if merged_names(each.op_name):
        return opcode
    return each.op_name.rsplit("/", 1)[-1] or opcode


def is_generated(each: Instruction) -> bool:
    """Whether XLA marks it as added by the partitioner."""
    return each.attributes.get("is_spmd_generated") == "true"


def is_of_argument(each: Instruction) -> bool:
    """Whether it is named after an argument, not an operation."""
    return bool(each.op_name) and "/" not in each.op_name


def parts_of(each: Instruction) -> list[Instruction]:
    """The instructions that it stands for; [] for those that stand for themselves."""
    return each.called[0].instructions if each.opcode in AROUND else []


def around(each: Instruction) -> Instruction | None:
    """What stands for the computation that it is part of, if anything does."""
    callers = each.computation.callers
    return callers[0] if callers and callers[0].opcode in AROUND else None


def inside(user: Instruction, operand: Instruction) -> list[Instruction]:
    """The parameters that stand for an operand inside of ``user``."""
    if user.opcode not in AROUND:
        return []
    parameters = user.called[0].parameters
    return [each for each in parameters if user.operands[each.parameter] is operand]


def reached(
    start: Instruction, onward: Callable[[Instruction], list[Instruction]]
) -> Iterator[Instruction]:
    """An instruction and those that ``onward`` leads to, breadth first."""
    waiting, seen = [start], {start}
    for each in waiting:  # The list grows in the loop.
        yield each
        new = [other for other in onward(each) if other not in seen]
        seen.update(new)
        waiting += new


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


def types(shapes: Iterable[Shape]) -> str:
    """Some arrays, such as ``f32[2,3] and 2 pieces of s32[4]``."""
    counts = collections.Counter(map(str, shapes))
    return " and ".join(
        type_ if count == 1 else f"{count:,} pieces of {type_}"
        for type_, count in counts.items()
    )
