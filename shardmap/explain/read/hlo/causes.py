"""Why the compiler put a collective in, and what would avoid it."""

from collections.abc import Iterator
from typing import NamedTuple

from shardmap._jax.collectives import ALL_COLLECTIVES
from shardmap.explain.read.hlo.text import Instruction, Module

_COLLECTIVES = frozenset(map(str, ALL_COLLECTIVES))

_VIEWS = frozenset(
    "bitcast copy transpose reshape convert copy-start copy-done".split()
)
_PARTS = frozenset("slice squeeze dynamic_slice gather".split())
_SUMS = (
    "reduce_",
    "scatter",
    "argmax",
    "argmin",
    "dot_general",
    "conv_general_dilated",
)


_Taker = tuple[Instruction, Instruction | None]
"""An instruction, and the fusion that it is in."""


class Cause(NamedTuple):
    """Why a collective is there.

    Attributes:
      text: why, in a sentence.
      advice: what would avoid it.
      is_rematerialised: whether an array is made whole only to be cut anew.
    """

    text: str
    advice: str
    is_rematerialised: bool = False


def cause_of(
    module: Module, sent: Instruction, kind: str, operation: str | None = None
) -> Cause | None:
    """The cause of a collective, if it is one of those that are known.

    None for what the user's own program sends.

    Args:
      module: the program.
      sent: the collective.
      kind: as XLA calls it.
      operation: what it is of, where XLA sends several values as one.
    """
    operation = operation or module.made_for(sent).operation
    if operation in _COLLECTIVES:
        return None
    takers = list(_takers(module, sent))
    by = [i for each, fusion in takers for i in (each, fusion) if i is not None]
    calls = [each for each, _ in takers if each.opcode == "custom-call"]
    becomes = _becomes(module, sent)
    if calls and kind == "all-gather":
        return Cause(
            f"{operation} is a call into a library, which XLA cannot cut: {becomes}",
            "Make the calls over a batch dimension that is cut, by spmap, jax.vmap or "
            "jax.shard_map: each device then does its own.",
        )
    if operation.startswith("scatter") and kind != "all-reduce":
        return Cause(
            "for a scatter into an array that is cut: each device looks through the "
            f"updates of all others for those of its part; {becomes}",
            "Cut a dimension that the indices do not pick from; or, where every device "
            "updates its own part only, scatter inside spmap or jax.shard_map, with "
            "indices that count within the part.",
        )
    if kind == "all-gather" and _only_cut_again(module, sent, takers):
        return Cause(
            "the array is made whole on every device and then cut in another way "
            f"(an involuntary full rematerialisation); {becomes}",
            "Lay it out in the same way before and after; where the layouts must "
            "differ, change one mesh axis at a time, with a constraint in between.",
            is_rematerialised=True,
        )
    if operation in _PARTS and kind in ("all-gather", "all-reduce"):
        return Cause(
            "a part is taken along a dimension that is cut, and the device that has "
            f"it sends it to all; {becomes}",
            "Cut another dimension than the one that is indexed; of an array that is "
            "there, sm.shard_of(x, i) gives what a device has, without sending.",
        )
    if kind == "all-reduce" and operation.startswith(_SUMS):
        return Cause(
            f"{operation} goes over a dimension that is cut",
            "Cut another dimension than the one it goes over. If all of it is needed, "
            "do it once, on as little as possible; if each device needs only a part "
            "of the result, ask for it cut.",
        )
    if kind == "all-gather" and (taker := _gathered_for(operation, by)):
        return Cause(
            f"{taker} needs more of an operand than a device has: {becomes}",
            "Cut the operand along a dimension that the operation keeps.",
        )
    return None


def _gathered_for(operation: str, by: list[Instruction]) -> str | None:
    """The operation that an array is gathered for.

    XLA names a gather after it, or after what made the array.
    """
    operations = {each.operation for each in by if each.operation}
    if operation in operations:
        return operation
    return operations.pop() if len(operations) == 1 else None


def _becomes(module: Module, sent: Instruction) -> str:
    """What a device has before and after."""
    before = ", ".join(_type(each) for each in module.operands_of(sent))
    return f"{before or 'what a device has'} on a device becomes {_type(sent)}"


def _type(each: Instruction) -> str:
    shapes = [f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in each.shapes]
    return " and ".join(shapes)


def _only_cut_again(module: Module, sent: Instruction, takers: list[_Taker]) -> bool:
    """Whether each device only takes a part, by its own number."""
    return bool(takers) and all(
        each.opcode == "dynamic-slice" and _by_device(module, sent, fusion or each)
        for each, fusion in takers
    )


def _by_device(module: Module, sent: Instruction, taker: Instruction) -> bool:
    """Whether something that is taken besides a result depends on the device."""
    waiting, seen = [taker], {taker.name, sent.name}
    for each in waiting:  # It grows meanwhile.
        if each.opcode == "partition-id":
            return True
        new = [other for other in module.operands_of(each) if other.name not in seen]
        seen.update(other.name for other in new)
        waiting += new
    return False


def _takers(module: Module, made: Instruction) -> Iterator[_Taker]:
    """What works on a result, however it is viewed, or moved in memory."""
    waiting: list[_Taker] = [(made, None)]
    seen = {made.name}
    for each, inside in waiting:  # It grows meanwhile.
        for user in module.users_of(each):
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode == "fusion":
                waiting += [(p, user) for p in module.parameters_of(user, each)]
            elif user.opcode in _VIEWS:
                waiting.append((user, inside))
                if user.is_root and inside is not None:
                    waiting.append((inside, None))
            else:
                yield user, inside
