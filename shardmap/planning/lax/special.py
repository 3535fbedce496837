"""Rules of collectives, callbacks, and primitives that are whole or refused."""

from functools import partial
from typing import Any

from jax.extend.core import primitives as p

from shardmap._jax.primitives import PURE_CALLBACK, axis_names
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.planning.engine.factors import Factors, taken_whole
from shardmap.planning.engine.nodes import Node, Refused
from shardmap.planning.engine.rules import Factor, Reason, RuleMaker
from shardmap.planning.lax import per_piece

TALKS = Reason(
    "it talks to the other elements of a mapped axis", "cut an axis that is not mapped"
)
TRANSPOSED = Reason("it is a placeholder that only differentiation puts in")


def collective(node: Node) -> Factors:
    """The rule of a collective over a mapped axis; any other primitive has none."""
    entry = COLLECTIVES.get(node.primitive)
    if entry is None:
        why = f"there is no rule for {node.name}"
        remedy = "register_rule gives it one; spmap(batch_size=) needs none"
        return taken_whole(node, Reason(why, remedy))
    if not entry.is_elementwise:
        return taken_whole(node, TALKS)
    # A batched collective combines along axes of its operands, as a reduction does.
    over = [k for k in axis_names(node.params) if isinstance(k, int)]
    reduction = entry.combiner if entry.is_reduction else None
    if over and not reduction:
        return taken_whole(node, TALKS)
    axes = [[(k, axis) for axis in range(len(s))] for k, s in enumerate(node.in_shapes)]
    outs = [[name for name in row if name[1] not in over] for row in axes]
    summed: dict[Factor, str] = {
        name: reduction for row in axes for name in row if reduction and name[1] in over
    }

    def passes(combiner: str, pending: frozenset[int]) -> str | None:
        every = len(pending) == len(node.ins)
        return combiner if combiner == reduction and every else None

    return Factors(node, axes, outs, summed, passes=passes, cheap=False)


def stateful(node: Node) -> Factors:
    draws = node.primitive is p.rng_uniform_p
    remedy = ": draw with jax.random.uniform and a key" if draws else ""
    raise Refused(
        f"{node.name} at {node.source} reads or changes state, and shards run in any "
        f"order{remedy}"
    )


STATEFUL = [p.after_all_p, p.create_token_p, p.get_p, p.rng_uniform_p, p.swap_p]

RULES: dict[Any, RuleMaker] = {
    **dict.fromkeys(STATEFUL, stateful),
    PURE_CALLBACK: per_piece.rule,
    p.custom_lin_p: partial(taken_whole, reason=TRANSPOSED),
}
