"""Barriers: identities at which cuts end, and other cuts begin."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors
from shardmap.planning.engine.nodes import Graph, Node, Operand, PlanPrimitive, Value
from shardmap.planning.engine.rules import (
    Cut,
    Forward,
    Link,
    Rule,
    RuleMaker,
    meet,
    nothing_passes,
)

BARRIER = PlanPrimitive("barrier")


def barrier(
    graph: Graph,
    value: Operand,
    *,
    passing: Collection[int] = (),
    cuts: Mapping[int, Cut] | None = None,
    complete: bool = True,
) -> Value:
    """Adds a barrier to a graph, and returns its result.

    Args:
      graph: the graph.
      value: its operand.
      passing: the axes along which cuts of ``value`` pass.
      cuts: the cuts that begin, by axis.
      complete: whether an earlier stage must compute ``value``.
    """
    begin = cuts or {}
    origins = frozenset().union(*(cut.origins for cut in begin.values()))
    params = {
        "passing": tuple(sorted(passing)),
        "begin": tuple((axis, begin[axis].at) for axis in sorted(begin)),
        "origins": tuple(sorted(origins)),
        "complete": complete,
    }
    [behind] = graph.add(BARRIER, params, [value], [value.aval])
    return behind


def ask(graph: Graph, cuts: Sequence[Sequence[Cut]]) -> None:
    """Cuts the outputs of a graph.

    Values that depend on no argument that is cut, such as random numbers of a key, are
    then computed in pieces.

    Args:
      graph: the graph, whose outputs are replaced.
      cuts: of each output's axes.
    """
    graph.source, graph.source_info = "out_slices", None
    for k, (output, row) in enumerate(zip(graph.outputs, cuts, strict=True)):
        if isinstance(output, Value) and any(cut.at for cut in row):
            graph.outputs[k] = barrier(
                graph,
                output,
                passing=range(len(row)),
                cuts=dict(enumerate(row)),
                complete=False,
            )


MADE_OF_POSITIONS = frozenset({p.iota_p, p.random_bits_p, p.random_split_p})
"""The primitives that compute each element from its position."""


def begins(graph: Graph) -> list[Value]:
    """The values at which cuts can begin: no operand has their axes."""
    return [
        node.outs[0]
        for node in graph.nodes
        if node.primitive in MADE_OF_POSITIONS and node.outs[0].shape
    ]


def begin(graph: Graph, cuts: Sequence[Sequence[Cut]]) -> None:
    """Cuts values inside of a graph, where no argument could.

    Args:
      graph: the graph.
      cuts: of the first values of `begins`.
    """
    asked = {
        value.producer: dict(enumerate(row))
        for value, row in zip(begins(graph), cuts, strict=False)
        if any(cut.at for cut in row)
    }

    def cut(node: Node) -> list[Operand] | None:
        row = asked.pop(node, None)
        if row is None:
            return None
        avals = [out.aval for out in node.outs]
        [value] = graph.add(node.primitive, node.params, node.ins, avals)
        return [barrier(graph, value, passing=row, cuts=row, complete=False)]

    if asked:
        graph.rewrite(cut)


class Barrier(Factors):
    """See the module."""

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        params = self.node.params
        begin, origins = dict(params["begin"]), frozenset(params["origins"])
        row = []
        for axis, cut in enumerate(cuts[0]):
            begun = Cut(begin.get(axis, ()), origins=origins)
            row.append(meet([cut, begun] if axis in params["passing"] else [begun]))
        return Forward([row])

    def links(self) -> list[list[Link]]:
        passing = self.node.params["passing"]
        return [group for group in super().links() if group[0].axis in passing]


def rule(node: Node) -> Rule:
    axes, complete = range(len(node.in_shapes[0])), node.params["complete"]
    return Barrier(
        node,
        [axes],
        [axes],
        emitter=lambda local: local.values,
        complete=frozenset({0} if complete else ()),
        passes=nothing_passes if complete else lambda combiner, pending: combiner,
    )


RULES: dict[Any, RuleMaker] = {BARRIER: rule}
