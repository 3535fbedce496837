"""Why the compiler added a collective, and how to avoid it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardmap._jax.hlo import Instruction
from shardmap.explaining.read.constraints import LayoutConstraint
from shardmap.explaining.read.hlo.instructions import (
    around,
    inside,
    is_generated,
    is_of_argument,
    merged_names,
    operation_of,
    parts_of,
    reached,
)
from shardmap.explaining.read.hlo.sources import Sources

REMATERIALISED = (
    "the array is made whole on every device, then cut in another way (an involuntary "
    "full rematerialization)"
)
_PASSED = frozenset(
    "bitcast copy transpose reshape convert fusion parameter async-start".split()
)
"""Instructions that pass a value on to the ones that compute with it."""
_POINTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp compare convert cosine divide erf exponential "
    "exponential-minus-one floor log log-plus-one logistic maximum minimum multiply "
    "negate not or power remainder round-nearest-afz round-nearest-even rsqrt select "
    "shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan "
    "tanh xor".split()
)
_MOVES = ("all-gather", "all-to-all", "collective-permute")
_PARTS = frozenset("slice squeeze dynamic_slice gather".split())
_TAKES_PART = ("slice", "dynamic-slice", "gather")
_LAYOUTS = frozenset("sharding_constraint reshard all-gather".split())
_SAME_LAYOUT = (
    "Shard the same dimensions over the same mesh axes, in the same order, before and "
    "after."
)
_PRODUCTS = ("dot", "conv_general_dilated")
_SUMS = ("reduce_", "scatter", "argmax", "argmin", *_PRODUCTS)


class Cause(NamedTuple):
    """Why a collective is there.

    Attributes:
      text: a sentence that gives the reason.
      advice: how to avoid it; None if it is expected.
      source: the line of the program that asks for it, if known.
    """

    text: str
    advice: str | None
    source: str | None = None


class _Seen(NamedTuple):
    """A collective that the compiler added, and its surroundings.

    Attributes:
      sent, kind: the collective and its kind.
      maker: the instruction that needs it.
      name, operation: JAX's names of its origin, such as ``jit(f)/dot_general``.
      takers: the instructions that use its result.
      asked: the layout constraint that needs it, if any.
    """

    sent: Instruction
    kind: str
    maker: Instruction
    name: str
    operation: str
    takers: list[Instruction]
    asked: LayoutConstraint | None

    @property
    def is_for_layout(self) -> bool:
        return self.asked is not None or self.operation in _LAYOUTS


def cause_of(
    sources: Sources,
    sent: Instruction,
    kind: str,
    one: tuple[int, str] | None = None,
    asked: Sequence[LayoutConstraint] = (),
) -> Cause:
    """The cause of a collective that the compiler added.

    Args:
      sources: the lines of its instructions.
      sent: the collective.
      kind: XLA's name of its kind.
      one: the place and the operation of one of several values that XLA sends as one.
      asked: the layouts that the program asks for.
    """
    maker = sources.made_for(sent)
    place, operation = one or (None, operation_of(maker))
    name = maker.op_name if place is None else merged_names(sent.op_name)[place]
    layout = _layout_of(sent, place, sources.of(sent), asked)
    seen = _Seen(sent, kind, maker, name, operation, _takers(sent), layout)
    cause = next(filter(None, (rule(seen) for rule in _RULES)))
    return cause if layout is None else cause._replace(source=layout.source)


def _layout_of(
    sent: Instruction,
    place: int | None,
    source: str | None,
    asked: Sequence[LayoutConstraint],
) -> LayoutConstraint | None:
    """The layout constraint nearby that the result satisfies."""
    if not sent.opcode.startswith(_MOVES):
        return None
    is_exchange = sent.opcode.startswith("all-to-all")
    shapes = [each.sizes for each in sent.shape.arrays()]
    if place is not None and not is_exchange:
        shapes = shapes[place : place + 1]
    # XLA drops, adds and transposes dimensions; an all-to-all sends pieces.
    there = sorted(size for size in shapes[-1] if size != 1)
    count = sum(map(math.prod, shapes))
    for each in asked:
        has_shape = (
            math.prod(each.shape) == count
            if is_exchange
            else sorted(size for size in each.shape if size != 1) == there
        )
        if has_shape and source in each.lines:
            return each
    return None


# Rules: the first that applies gives the cause.


def _call(seen: _Seen) -> Cause | None:
    is_call = any(each.opcode == "custom-call" for each in seen.takers)
    is_host = seen.operation.endswith("callback")
    if seen.kind != "all-gather" or not (is_call or is_host):
        return None
    what = "is a callback to the host" if is_host else "calls a library"
    return Cause(
        f"{seen.operation} {what}, which XLA cannot partition",
        "Make the calls over a batch dimension that is sharded, by spmap or "
        "jax.shard_map: each device then does its own.",
    )


def _scatter(seen: _Seen) -> Cause | None:
    if not seen.operation.startswith("scatter") or seen.kind == "all-reduce":
        return None
    return Cause(
        "a scatter into a sharded array: each device looks through the updates of all "
        "others for those of its part",
        "Shard a dimension that the indices do not pick from. Where every device "
        "updates only its own part, scatter inside spmap or jax.shard_map, with "
        "indices into that part.",
    )


def _rematerialised(seen: _Seen) -> Cause | None:
    if seen.kind != "all-gather" or not _only_cut_again(seen):
        return None
    return Cause(
        REMATERIALISED,
        "Lay it out in the same way before and after. Where the layouts must differ, "
        "change one mesh axis at a time, with a constraint in between.",
    )


def _part(seen: _Seen) -> Cause | None:
    if seen.operation not in _PARTS or seen.kind not in ("all-gather", "all-reduce"):
        return None
    how = "the device that has it sends it to all"
    if seen.kind == "all-gather":
        if seen.is_for_layout or _is_part(seen):
            return None
        how = "each device is sent the whole dimension"
    return Cause(
        f"{seen.operation} takes a part along a sharded dimension: {how}",
        "Shard another dimension than the indexed one. For an existing array, "
        "sm.shard_of(x, i) gives the shard of a device without communication.",
    )


def _sum(seen: _Seen) -> Cause | None:
    is_sum = seen.operation.startswith(_SUMS)
    if not is_sum or seen.kind not in ("all-reduce", "reduce-scatter"):
        return None
    if "transpose(" in seen.name:
        what = "the gradients of all shards are summed"
    elif seen.operation.startswith(_PRODUCTS):
        what = f"the partial products of {seen.operation} are summed"
    else:
        what = f"the results of {seen.operation} on all shards are combined"
    return Cause(f"expected, as {what}", None)


def _until_all_are_done(seen: _Seen) -> Cause | None:
    if seen.operation != "while" or seen.kind != "all-reduce":
        return None
    return Cause(
        "in each step of a loop the devices ask each other whether one of them goes "
        "on: all loop until the slowest is done",
        "Loop inside spmap or jax.shard_map: each device then stops when its own "
        "elements are done.",
    )


def _gathered(seen: _Seen) -> Cause | None:
    if seen.kind != "all-gather":
        return None
    pointwise = all(each.opcode in _POINTWISE for each in seen.takers)
    if seen.is_for_layout or pointwise:
        or_computed = "" if seen.is_for_layout else ", or for a value computed from it,"
        return Cause(
            f"the layout that this line asks for{or_computed} has larger shards",
            "Ask for the same sharding as before, if each device needs only its shard.",
        )
    return Cause(
        f"{_gathered_for(seen) or 'an operation'} needs more of an operand than a "
        "device has",
        "Shard the operand along a dimension that the operation keeps.",
    )


def _exchanged(seen: _Seen) -> Cause | None:
    if seen.kind != "all-to-all":
        return None
    along = "For an operation along one dimension, such as a sort, shard another."
    return Cause(
        "an array that is sharded along one dimension is needed sharded along "
        f"another, {_wanted(seen)}",
        _SAME_LAYOUT if seen.is_for_layout else f"{_SAME_LAYOUT} {along}",
    )


def _sent_on(seen: _Seen) -> Cause | None:
    if seen.kind != "collective-permute":
        return None
    along = "Or shard another dimension than the one along which elements move."
    return Cause(
        f"elements are needed on other devices, {_wanted(seen)}",
        f"{_SAME_LAYOUT} {along}",
    )


def _combined(seen: _Seen) -> Cause:
    if not seen.name:
        return Cause(
            "XLA does not say for which operation",
            "Explain parts of the function alone, to find the one that has it.",
        )
    return Cause(
        f"{seen.operation} needs values of other devices",
        "Shard another dimension than the one along which it combines elements.",
    )


_RULES = (
    _call,
    _scatter,
    _rematerialised,
    _part,
    _sum,
    _until_all_are_done,
    _gathered,
    _exchanged,
    _sent_on,
    _combined,
)


def _wanted(seen: _Seen) -> str:
    if seen.is_for_layout:
        return "by the layout that this line asks for"
    return f"for {seen.operation}"


def _is_part(seen: _Seen) -> bool:
    """Whether each device slices its operand before it sends."""
    return any(
        part.opcode in _TAKES_PART
        for operand in seen.sent.operands
        for part in [operand, *parts_of(operand)]
    )


def _gathered_for(seen: _Seen) -> str | None:
    """The operation that an array is gathered for.

    XLA names a gather after this operation, or after the one that made the array.
    """
    operations = {
        operation_of(each)
        for taker in seen.takers
        for each in (taker, around(taker))
        if each and each.op_name and not is_generated(each) and not is_of_argument(each)
    }
    is_of_taker = seen.maker is not seen.sent
    if seen.operation in operations or (is_of_taker and not operations):
        return seen.operation
    return operations.pop() if len(operations) == 1 else None


def _only_cut_again(seen: _Seen) -> bool:
    """Whether each device only slices the result at its own index."""

    def others(each: Instruction) -> list[Instruction]:
        return [o for o in each.operands if o is not seen.sent]

    def is_by_device(taker: Instruction) -> bool:
        outside = around(taker) or taker
        return any(each.opcode == "partition-id" for each in reached(outside, others))

    return bool(seen.takers) and all(
        each.opcode == "dynamic-slice" and is_by_device(each) for each in seen.takers
    )


def _takers(result: Instruction) -> list[Instruction]:
    """The instructions that compute with a result, behind views and copies."""

    def is_passed(each: Instruction) -> bool:
        return each.opcode in _PASSED or each.opcode.endswith(("-start", "-done"))

    def onward(each: Instruction) -> list[Instruction]:
        if each is not result and not is_passed(each):
            return []
        outside = around(each) if each.is_root else None
        takers = [] if outside is None else [outside]
        for user in each.users:
            takers += inside(user, each) or [user]
        return takers

    takers = reached(result, onward)
    return [each for each in takers if each is not result and not is_passed(each)]
