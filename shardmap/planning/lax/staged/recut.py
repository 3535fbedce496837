"""Cuts an operation along another axis than its operand, which is kept in between.

A transform along rows and one along columns need a different axis whole. Where a cut
ends at the second one, its operand is kept, and the operation is cut along a batch
axis. Without a batch axis, as in ``eigh(x @ x.T)``, the operand is still computed in
pieces if it is smaller than what it is computed from, or random. Of arguments, only
those are kept of whose sort single places are taken, as in medians and quantiles.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import primitives as p

from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.engine.rules import UNCUT, Cut, Origins, Rule, Stages
from shardmap.planning.lax import batched, pointwise
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.lax.staged.barrier import barrier
from shardmap.planning.lax.table import TABLE

TAKE = frozenset({p.gather_p, p.slice_p})


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Adds a node whose operands are cut along another axis; None if it is no use."""
    rule = functools.cache(TABLE.rule)
    taken, given = rule(node).links()
    passing = [
        {k: list(row).index(name) for k, row in enumerate(taken) if name in row}
        for name in dict.fromkeys(itertools.chain(*taken))
        if name is not None and name in itertools.chain(*given)
    ]
    if any(cuts[k][axis].at for axes in passing for k, axis in axes.items()):
        return None

    def size(axes: dict[int, int]) -> int:
        return max((node.in_shapes[k][axis] for k, axis in axes.items()), default=1)

    longest = max(passing, key=size, default={})
    another = longest if size(longest) > 1 else {}
    changed: dict[int, Value] = {}
    selects = node.primitive is p.sort_p and _are_selected(graph, node.outs)
    for k, (operand, row) in enumerate(zip(node.ins, cuts, strict=True)):
        count = math.prod(len(cut.at) + 1 for cut in row)
        if count == 1 or not isinstance(operand, Value):
            continue
        sources = _sources(operand, rule)
        behind = [UNCUT] * len(row)
        if k in another and (sources or selects):
            axis, length = another[k], operand.shape[another[k]]
            count = min(count, length)
            at = tuple(piece * length // count for piece in range(1, count))
            origins: Origins = frozenset().union(*(cut.origins for cut in row))
            behind[axis] = Cut(at, False, origins)
        elif not any(_is_smaller(operand, source) for source in sources):
            continue
        changed[k] = barrier(graph, operand, cuts=behind)
    if not changed:
        return None
    ins = [changed.get(k, operand) for k, operand in enumerate(node.ins)]
    return graph.add(node.primitive, node.params, ins, [out.aval for out in node.outs])


def _are_selected(graph: Graph, values: Sequence[Value]) -> bool:
    """Whether nothing as large as these values is made of them."""
    stack = list(values)
    while stack:
        for user in graph.users(stack.pop()):
            if user.primitive in pointwise.RULES:
                stack += user.outs
            elif user.primitive not in TAKE and user.primitive not in COMBINERS:
                return False
    return True


def _sources(value: Value, rule: Callable[[Node], Rule]) -> list[Node]:
    """The costly operations that cheap ones compute a value from."""
    costly: list[Node] = []
    nodes, stack = set[Node](), [value]
    while stack:
        node = stack.pop().producer
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if rule(node).cheap:
            stack += [x for x in node.ins if isinstance(x, Value)]
        else:
            costly.append(node)
    return costly


def _is_smaller(value: Value, source: Node) -> bool:
    """Whether a value is smaller than what an operation computes it from."""
    if source.primitive is p.random_bits_p:
        return True  # The counters that it hashes take several times as much.
    return 2 * value.size <= max((x.aval.size for x in source.ins), default=0)


STAGES: dict[Any, Stages] = dict.fromkeys(batched.RULES, in_stages)
