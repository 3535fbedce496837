"""Cuts that begin at results: an identity at which the cuts that are asked for appear.

What a function makes of no argument that is cut, such as random numbers of a key, is
then made piece by piece.
"""

from collections.abc import Sequence
from typing import Any

from shardmap.plan.engine.factors import Factors
from shardmap.plan.engine.nodes import Graph, Node, PlanPrimitive, Value
from shardmap.plan.engine.rules import Cut, Forward, Rule, meet

ASKED = PlanPrimitive("asked cuts")


def ask(graph: Graph, cuts: Sequence[Sequence[Cut]]) -> None:
    """Cuts the outputs of a graph.

    Args:
      graph: the graph, whose outputs are replaced.
      cuts: of each output's axes.
    """
    for k, (output, row) in enumerate(zip(graph.outputs, cuts, strict=True)):
        if isinstance(output, Value) and any(cut.at for cut in row):
            params = {"cuts": tuple(cut.at for cut in row)}
            [graph.outputs[k]] = graph.add(
                ASKED, params, [output], [output.aval], "out_slices"
            )


class AskedCuts(Factors):
    """All axes pass, and get cuts of their own."""

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        asked = [Cut(tuple(at)) for at in self.node.params["cuts"]]
        return Forward([[meet(pair) for pair in zip(cuts[0], asked, strict=True)]])


def rule(node: Node) -> Rule:
    axes = range(len(node.in_shapes[0]))
    return AskedCuts(
        node,
        [axes],
        [axes],
        emitter=lambda local: local.values,
        commutes=lambda combiner, pending: combiner,
    )


RULES: dict[Any, Any] = {ASKED: rule}
