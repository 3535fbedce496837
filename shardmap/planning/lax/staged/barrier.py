"""Barriers: identities at which cuts end, and other cuts begin."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors
from shardmap.planning.engine.nodes import Graph, Node, Operand, PlanPrimitive, Value
from shardmap.planning.engine.rules import (
    UNCUT,
    Cut,
    Forward,
    Names,
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
    cuts: Sequence[Cut] = (),
    complete: bool = True,
) -> Value:
    """Adds a barrier to a graph, and returns its result.

    Cuts of ``value`` pass along the axes in ``passing``, and ``cuts`` begin. An earlier
    stage must compute ``value`` if it is ``complete``: of an argument it is a copy.
    """
    if complete and value.producer is None:
        [value] = graph.add(p.copy_p, {}, [value], [value.aval])
    begin = tuple(cuts) or (UNCUT,) * len(value.shape)
    params = {"passing": tuple(passing), "begin": begin, "complete": complete}
    [behind] = graph.add(BARRIER, params, [value], [value.aval])
    return behind


def cut_outputs(graph: Graph, cuts: Sequence[Sequence[Cut]], *, complete: bool) -> None:
    """Cuts the outputs of a new graph, such as random numbers of a key.

    If they are to be complete, they are kept, and cut in a stage behind.
    """
    graph.source, graph.source_info = "out_slices", None
    for k, (output, row) in enumerate(zip(graph.outputs, cuts, strict=False)):
        if isinstance(output, Value) and any(cut.at for cut in row):
            passing = () if complete else range(len(row))
            graph.outputs[k] = barrier(
                graph, output, passing=passing, cuts=row, complete=complete
            )


MADE_OF_POSITIONS = frozenset({p.iota_p, p.random_bits_p, p.random_split_p})
"""The primitives that compute each element from its position."""


def _is_beginning(node: Node) -> bool:
    return node.primitive in MADE_OF_POSITIONS and bool(node.outs[0].shape)


def begins(graph: Graph) -> list[Value]:
    """The values at which cuts can begin: no operand has their axes."""
    return [node.outs[0] for node in filter(_is_beginning, graph.nodes)]


def begin(graph: Graph, cuts: Sequence[Sequence[Cut]]) -> Graph:
    """Cuts the first values of `begins` inside of a graph, where no argument could."""
    rows, behind = iter(cuts), set[Node]()

    def cut(graph: Graph, node: Node) -> list[Operand] | None:
        row = next(rows, ()) if _is_beginning(node) and node not in behind else ()
        if not any(cut.at for cut in row):
            return None
        avals = [out.aval for out in node.outs]
        [value] = graph.add(node.primitive, node.params, node.ins, avals)
        behind.add(graph.nodes[-1])
        axes = range(len(row))
        return [barrier(graph, value, passing=axes, cuts=row, complete=False)]

    return graph.rewritten(cut)


class Barrier(Factors):
    """See the module."""

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        passing, begin = self.node.params["passing"], self.node.params["begin"]
        pairs = enumerate(zip(cuts[0], begin, strict=True))
        return Forward(
            [[meet([cut, new]) if k in passing else new for k, (cut, new) in pairs]]
        )

    def links(self) -> tuple[Names, Names]:
        passing = self.node.params["passing"]
        names = [axis if axis in passing else None for axis in self.ins[0]]
        return [names], [names]


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
