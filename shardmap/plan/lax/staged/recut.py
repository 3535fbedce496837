"""A change of cut: a value made in pieces of one axis, and read in those of another.

A transform along rows, and then along columns, needs each axis whole once. Where a cut
ends at the second one, what it reads is kept, and it is cut along another axis, which
it treats index by index.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardmap._jax.types import Equation
from shardmap.plan.engine.nodes import (
    Graph,
    Node,
    Operand,
    Rewrite,
    Value,
    avals,
)
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut, Origins
from shardmap.plan.lax import batched
from shardmap.plan.lax.staged.barrier import barrier


def changes(analysis: Analysis) -> dict[int, tuple[Node, int, Cut]]:
    """The nodes whose operand may change its cut: by the id of their parameters.

    Each with the axis that is to be cut, and how.
    """
    found = {}
    for node in dict.fromkeys(ended.node for ended in analysis.ended):
        if node.primitive not in batched.RULES or len(node.ins) != 1:
            continue
        [operand] = node.ins
        if not isinstance(operand, Value) or not _costly(analysis, operand):
            continue
        cuts = analysis.cuts[operand]
        passing = {
            link.axis
            for group in analysis.rules[node.number].links()
            if {each.side for each in group} == {"in", "out"}
            for link in group
            if link.side == "in" and operand.shape[link.axis] > 1
        }
        if not passing or any(cuts[axis].at for axis in passing):
            continue
        axis = max(passing, key=lambda axis: (operand.shape[axis], -axis))
        size = operand.shape[axis]
        count = min(math.prod(len(cut.at) + 1 for cut in cuts), size)
        at = tuple(k * size // count for k in range(1, count))
        origins: Origins = frozenset().union(*(cut.origins for cut in cuts))
        found[id(node.params)] = node, axis, Cut(at, False, origins)
    return found


def _costly(analysis: Analysis, value: Value) -> bool:
    """Whether it is more than arguments brought into another form."""
    node = value.producer
    while node is not None and analysis.rules[node.number].cheap:
        sources = [v for v in node.ins if isinstance(v, Value) and v.producer]
        node = sources[0].producer if sources else None
    return node is not None


def rewrite(chosen: Mapping[int, tuple[Node, int, Cut]]) -> dict[Any, Rewrite]:
    """Rewrites the equations that these nodes come from."""

    def with_change(
        graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
    ) -> Sequence[Operand] | None:
        if id(equation.params) not in chosen:
            return None
        _, axis, cut = chosen[id(equation.params)]
        [operand] = ins
        changed = barrier(graph, operand, source, cuts={axis: cut})
        made = avals(equation.outvars)
        return graph.add(equation.primitive, equation.params, [changed], made, source)

    return {node.primitive: with_change for node, _, _ in chosen.values()}
