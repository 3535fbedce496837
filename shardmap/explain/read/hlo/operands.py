"""What a device has before a collective, and after."""

import collections
import re
from collections.abc import Iterable

from shardmap.explain.read.hlo.text import Instruction, Module

_DIMENSIONS = re.compile(r"\ball-gather.*\bdimensions=\{(\d+)\}")


def becomes(
    module: Module, sent: Instruction, operation: str, place: int | None
) -> str:
    """What a device has before and after, in words.

    Args:
      module: the program.
      sent: the collective.
      operation: what it is of.
      place: which of several values that XLA sends as one; None: all.
    """
    one = slice(None) if place is None else slice(place, place + 1)
    operands = module.operands_of(sent)[one]
    before = types(shape for each in operands for shape in each.shapes)
    after = types(sent.shapes[one])
    if sent.opcode.startswith("all-to-all"):
        return f"{after} of a device go to the others, one to each"
    if sent.opcode.startswith("collective-permute"):
        return f"{before or after} of a device goes to another"
    if sent.opcode.startswith("all-reduce"):
        return f"{after} of each device become one, on all"
    text = f"{before or f'what {operation} has'} on a device becomes {after}"
    along = _DIMENSIONS.search(sent.line)
    return text if along is None else f"{text}, gathered along dimension {along[1]}"


def types(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Some arrays, such as ``f32[2,3] and 2 pieces of s32[4]``."""
    counts = collections.Counter(
        f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in shapes
    )
    return " and ".join(
        type_ if count == 1 else f"{count:,} pieces of {type_}"
        for type_, count in counts.items()
    )
