"""Why the compiler added a collective, and how to avoid it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardmap.explaining.read.arrays import ShardedArgument
from shardmap.explaining.read.hlo.cost import POINTWISE, product_flops
from shardmap.explaining.read.hlo.instructions import (
    MOVES,
    SUMS,
    around,
    inside,
    operation_of,
    parts_of,
    reached,
)
from shardmap.explaining.read.hlo.loops import given, origin
from shardmap.explaining.read.hlo.module import Instruction
from shardmap.explaining.read.hlo.sources import Sources

REMATERIALISED = (
    "the array is made whole on every device, then cut in another way (an involuntary "
    "full rematerialization)"
)
AGAIN = "again in the gradient, as jax.checkpoint computes it again"
CUT = "of which each device then keeps a part"
_PASSED = frozenset("bitcast copy transpose reshape convert fusion parameter".split())
"""Instructions that pass a value on to the ones that compute with it."""
_MOVED = frozenset(
    (
        "bitcast copy copy-start copy-done async-done convert transpose reshape "
        "broadcast slice dynamic-slice concatenate optimization-barrier custom-call"
    ).split()
    + [f"{kind}{part}" for kind in MOVES for part in ("", "-start", "-done")]
)
"""Instructions whose result is their first operand, or a part of it, elsewhere."""
_PARTS = frozenset("slice squeeze dynamic_slice gather".split())
_SEVERAL = ("all-gather", "all-reduce", "reduce-scatter", "async")
"""Instructions whose results may be several values that are sent as one."""
_TAKES_PART = ("slice", "dynamic-slice", "gather")
_LAYOUTS = frozenset("sharding_constraint reshard all-gather".split())
_SAME_LAYOUT = (
    "Shard the same dimensions over the same mesh axes, in the same order, before and "
    "after."
)
_PRODUCTS = ("dot", "conv_general_dilated")


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
      sent, operand, kind: the collective, what it sends and its kind.
      name, operation: JAX's names of its origin, such as ``jit(f)/dot_general``.
      takers: the instructions that use its result.
      sources: the lines of instructions.
      axes: the mesh axes that it is along.
      arguments: those that are sharded, by name.
    """

    sent: Instruction
    operand: Instruction
    kind: str
    name: str
    operation: str
    takers: list[Instruction]
    sources: Sources
    axes: tuple[str, ...]
    arguments: Mapping[str, ShardedArgument]

    @property
    def is_for_layout(self) -> bool:
        return self.operation in _LAYOUTS

    def is_cut(self, name: str | None) -> bool:
        """Whether an argument is sharded along axes of the collective."""
        there = self.arguments.get(name or "")
        return there is not None and not there.axes.isdisjoint(self.axes)


def cause_of(
    sources: Sources,
    sent: Instruction,
    operand: Instruction,
    kind: str,
    name: str | None,
    axes: tuple[str, ...],
    arguments: Mapping[str, ShardedArgument],
) -> Cause:
    """The cause of a collective that the compiler added; for the arguments see `_Seen`.

    ``name`` is only given for one of several values that XLA sends as one.
    """
    if name is None:
        named = maker = sources.made_for(sent)
        if kind in SUMS and not maker.op_name:
            named = _before(operand)
        name, operation = named.op_name, operation_of(named if named.op_name else maker)
    else:
        operation = name.rsplit("/", 1)[-1]
    takers = _takers(sent, sent.operands.index(operand))
    about = name, operation, takers, sources
    seen = _Seen(sent, operand, kind, *about, axes, arguments)
    return next(filter(None, (rule(seen) for rule in _RULES[kind])))


# Rules: the first of those of a kind that applies gives the cause.


def _of_weights(seen: _Seen) -> Cause | None:
    """Arrays that are sharded along one axis, of which one is gathered for a product.

    Weights that are sharded along the axis of a batch, or the batch before weights that
    are sharded along another axis.
    """
    argument, products = _argument_of(seen.operand), _products(seen)
    lines = (seen.sources.line(each) for each in (*products, seen.sent))
    line = next(filter(None, lines), None)
    weights = seen.arguments.get(argument or "")
    # Not other weights: all of a step's come back.
    batches = weights and [
        name
        for name, each in seen.arguments.items()
        if name != argument and seen.is_cut(name)
        if not (each.comes_back and weights.comes_back)
    ]
    if weights and not seen.is_for_layout and seen.is_cut(argument) and batches:
        if products or weights.comes_back:
            text = f"expected: weights, gathered where used ({argument})"
            return Cause(text, None, line)
    for product in products:
        for factor in map(_argument_of, product.operands[:2]):
            if factor != argument and seen.is_cut(factor):
                return Cause(
                    f"expected: gathered for the product with {factor}, which is "
                    "sharded along the same mesh axis",
                    None,
                    line,
                )
    return None


def _overlapped(seen: _Seen) -> Cause | None:
    """What goes around while a product is computed from the parts that are there."""
    name = seen.sent.op_name
    if all(each.op_name != name for each in _products(seen)):
        return None
    before = _before(seen.operand)
    if before.opcode not in ("add", "select", "while") and not product_flops(before):
        return None
    seen = seen._replace(name=name, operation=operation_of(seen.sent))
    return _summed(seen)._replace(source=seen.sources.line(seen.sent))


def _call(seen: _Seen) -> Cause | None:
    calls = [each for each in seen.takers if each.opcode == "custom-call"]
    is_call = any(not product_flops(each) for each in calls)
    is_host = seen.operation.endswith("callback")
    if not (is_call or is_host):
        return None
    what = "is a callback to the host" if is_host else "calls a library"
    return Cause(
        f"{seen.operation} {what}, which XLA cannot partition",
        "Make the calls over a batch dimension that is sharded, by spmap or "
        "jax.shard_map: each device then does its own.",
    )


def _scatter(seen: _Seen) -> Cause | None:
    if not seen.operation.startswith("scatter"):
        return None
    return Cause(
        "a scatter into a sharded array: each device looks through the updates of all "
        "others for those of its part",
        "Shard a dimension that the indices do not pick from. Where every device "
        "updates only its own part, scatter inside spmap or jax.shard_map, with "
        "indices into that part.",
    )


def _rematerialised(seen: _Seen) -> Cause | None:
    if not _only_cut_again(seen):
        return None
    return Cause(
        REMATERIALISED,
        "Lay it out in the same way before and after. Where the layouts must differ, "
        "change one mesh axis at a time, with a constraint in between.",
    )


def _part(seen: _Seen) -> Cause | None:
    if seen.operation not in _PARTS:
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


def _sum(seen: _Seen) -> Cause:
    cause = _summed(seen)
    is_cut = seen.kind == "all-reduce" and _only_cut_again(seen)
    return cause._replace(text=f"{cause.text}, {CUT}") if is_cut else cause


def _summed(seen: _Seen) -> Cause:
    """What a sum of all devices is of."""
    before = _before(seen.operand)
    if "rematted_computation" in seen.name:
        return Cause(f"expected, as {seen.operation} is summed {AGAIN}", None)
    if "transpose(" in seen.name:
        return Cause("expected, as the gradients of all shards are summed", None)
    if product_flops(before) or seen.operation.startswith(_PRODUCTS):
        what = f"the partial products of {seen.operation} are summed"
    else:
        what = f"the results of {seen.operation} on all shards are combined"
    return Cause(f"expected, as {what}", None)


def _until_all_are_done(seen: _Seen) -> Cause | None:
    if seen.operation != "while":
        return None
    return Cause(
        "in each step of a loop the devices ask each other whether one of them goes "
        "on: all loop until the slowest is done",
        "Loop inside spmap or jax.shard_map: each device then stops when its own "
        "elements are done.",
    )


def _gathered(seen: _Seen) -> Cause:
    pointwise = all(each.opcode in POINTWISE for each in seen.takers)
    if seen.is_for_layout or pointwise:
        or_computed = "" if seen.is_for_layout else ", or for a value computed from it,"
        return Cause(
            f"the layout that this line asks for{or_computed} has larger shards",
            "Ask for the same sharding as before, if each device needs only its shard.",
        )
    return Cause(
        f"{seen.operation} needs more of an operand than a device has",
        "Shard the operand along a dimension that the operation keeps.",
    )


def _moved(seen: _Seen) -> Cause:
    what = "elements are needed on other devices"
    along = "Or shard another dimension than the one along which elements move."
    if seen.kind == "all-to-all":
        what = (
            "an array that is sharded along one dimension is needed sharded along "
            "another"
        )
        along = "For an operation along one dimension, such as a sort, shard another."
    if seen.is_for_layout:
        return Cause(f"{what}, by the layout that this line asks for", _SAME_LAYOUT)
    return Cause(f"{what}, for {seen.operation}", f"{_SAME_LAYOUT} {along}")


_RULES: dict[str, tuple[Callable[[_Seen], Cause | None], ...]] = {
    "all-gather": (_call, _scatter, _rematerialised, _of_weights, _part, _gathered),
    "all-reduce": (_part, _until_all_are_done, _sum),
    "reduce-scatter": (_scatter, _sum),
    "all-to-all": (_scatter, _moved),
    "collective-permute": (_overlapped, _scatter, _of_weights, _moved),
}


def _is_part(seen: _Seen) -> bool:
    """Whether each device slices its operand before it sends."""
    return any(
        part.opcode in _TAKES_PART
        for operand in seen.sent.operands
        for part in [operand, *parts_of(operand)]
    )


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


def _products(seen: _Seen) -> list[Instruction]:
    """The products that take a result, or that run in a loop while it goes around."""
    products = [each for each in seen.takers if product_flops(each)]
    if seen.kind != "collective-permute" or products:
        return products
    name = seen.sent.op_name
    alike = seen.sent.computation.by_op_name.get(name, [])
    bodies = [each.called[0] for each in alike if each.opcode == "while"]
    for body in bodies:
        alike = alike + body.by_op_name.get(name, [])
    return [each for each in alike if product_flops(each)]


def _argument_of(each: Instruction) -> str | None:
    """The name of the argument that a result is, or a part of, moved or converted."""
    path: tuple[int, ...] = ()
    while True:
        each, path, _ = origin(each, path, (), _MOVED)
        if each.opcode == "parameter" and not each.computation.callers:
            return each.op_name
        call, before = each, None
        if each.opcode == "parameter":
            call, before = given(each)
        if call.opcode == "while":
            # In its steps, parts of the value may go around.
            before = call.operands[0]
            around_it, path, _ = origin(call.called[0].root, path, (), _MOVED)
            if around_it not in call.called[0].parameters:
                return None
        if before is None:
            return None
        each = before


def _before(each: Instruction) -> Instruction:
    """The instruction that computes a result, which may be moved or converted."""
    each, path, _ = origin(each, (), (), _MOVED)
    while each.opcode == "parameter" and (outside := around(each)) is not None:
        each, path, _ = origin(outside.operands[each.parameter], path, (), _MOVED)
    return each


def _takers(sent: Instruction, place: int) -> list[Instruction]:
    """The instructions that compute with a result, behind views and copies."""
    result = _arrived(sent)

    def is_passed(each: Instruction) -> bool:
        if each.opcode == "get-tuple-element":
            before = each.operands[0].opcode.removesuffix("-done")
            return before in _SEVERAL and each.index == place
        # XLA for TPU calls some instructions of its own.
        is_own = each.opcode == "custom-call" and not each.op_name
        ends = each.opcode.endswith(("-start", "-done"))
        return is_own or ends or each.opcode in _PASSED

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


def _arrived(sent: Instruction) -> Instruction:
    """The instruction that has the result: of what runs on the side, its end.

    XLA for TPU starts it in one fusion, and waits for it in another.
    """
    start = around(sent)
    if start is None or "async_collective_fusion_config" not in sent.config:
        return sent
    for each in start.computation.instructions:
        parts = parts_of(each)
        if any(part.target == "AsyncCollectiveDone" for part in parts):
            if any(part.channel == sent.channel for part in parts):
                return each
    return sent
