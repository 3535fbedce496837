"""Cuts an operation along another axis than its operand, which is kept in between.

A transform along rows and one along columns need a different axis whole. Where a cut
ends at the second one, its operand is kept, and the operation is cut along a batch
axis. Without a batch axis, as in ``eigh(x @ x.T)``, the operand is still computed in
pieces if it is smaller than what it is computed from.
"""

import math
from collections.abc import Callable, Sequence

from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.engine.rules import Cut, Origins, Rule
from shardmap.plan.lax.staged.barrier import barrier


def in_stages(
    graph: Graph,
    node: Node,
    cuts: Sequence[Cut],
    rule: Callable[[Node], Rule],
) -> Sequence[Operand] | None:
    """Adds a node whose operand is cut along another axis; None if this is of no use.

    Args:
      graph: the graph.
      node: takes one operand.
      cuts: of the operand.
      rule: returns the rule of a node.
    """
    [operand] = node.ins
    passing = {
        link.axis
        for group in rule(node).links()
        if {each.side for each in group} == {"in", "out"}
        for link in group
        if link.side == "in" and operand.shape[link.axis] > 1
    }
    if any(cuts[axis].at for axis in passing):
        return None
    if not isinstance(operand, Value) or not (source := _costly(operand, rule)):
        return None
    behind: dict[int, Cut] = {}
    if passing:
        axis = max(passing, key=lambda axis: (operand.shape[axis], -axis))
        size = operand.shape[axis]
        count = min(math.prod(len(cut.at) + 1 for cut in cuts), size)
        at = tuple(k * size // count for k in range(1, count))
        origins: Origins = frozenset().union(*(cut.origins for cut in cuts))
        behind[axis] = Cut(at, False, origins)
    elif 2 * operand.size > max(each.aval.size for each in source.ins):
        return None
    changed = barrier(graph, operand, cuts=behind)
    made = [out.aval for out in node.outs]
    return graph.add(node.primitive, node.params, [changed], made)


def _costly(value: Value, rule: Callable[[Node], Rule]) -> Node | None:
    """The costly operation that computes a value; None if only cheap ones do."""
    node = value.producer
    while node is not None and rule(node).cheap:
        node = next((v.producer for v in node.ins if v.producer), None)
    return node
