"""Rewrites the graph of a function so that its cuts go as far as they can.

`ONCE` and `PASSES` are all passes, in order, and `analysed` is what drives them. What
they leave is analysed, see `propagate`. That shows which values no stage may compute
again (`must_store`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardmap._jax.types import AnyJaxpr
from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.jaxpr_key import share_equal
from shardmap.planning.engine.nodes import Graph, Value, flatten
from shardmap.planning.engine.propagate import propagate
from shardmap.planning.lax.compared import must_store
from shardmap.planning.lax.control.rows import by_rows
from shardmap.planning.lax.follow import Cuts, Rules, follow
from shardmap.planning.lax.indexed.known import fold
from shardmap.planning.lax.staged import barrier
from shardmap.planning.lax.table import TABLE


def cut_inside(graph: Graph, cuts: Cuts, rules: Rules) -> Graph:
    """Begins the cuts of results, and those of `Function.values` inside."""
    graph = barrier.begin(graph, cuts.inside)
    barrier.cut_outputs(graph, cuts.outputs or (), complete=False)
    barrier.cut_outputs(graph, cuts.anew, complete=True)
    return graph


ONCE: Sequence[Callable[[Graph], Graph]] = (share_equal, fold, by_rows)
"""The passes that see no cuts, in order: they run once for a function.

`fold` evaluates what indices are made of, after equal equations have become one.
`by_rows` looks at which results of a loop are used."""

PASSES: Sequence[Callable[[Graph, Cuts, Rules], Graph]] = (cut_inside, follow)
"""The passes that see the cuts, in order."""


class Function(NamedTuple):
    """What no cut changes: a graph after the passes `ONCE`, and the rules of nodes."""

    graph: Graph
    rules: Rules

    @property
    def values(self) -> list[Value]:
        """The arguments, then the values that are cut inside."""
        return [*self.graph.inputs, *barrier.begins(self.graph)]


def function_of(closed: AnyJaxpr) -> Function:
    """The function of a jaxpr, which can be analysed for any cuts."""
    graph = flatten(closed, TABLE)
    for rewritten in ONCE:
        graph = rewritten(graph)
    return Function(graph, Rules())


def analysed(function: Function, cuts: Cuts) -> Analysis:
    """The analysis of a function for these cuts."""
    graph, rules = function
    for rewritten in PASSES:
        graph = rewritten(graph, cuts, rules)
    analysis = propagate(graph, rules, cuts.inputs, cuts.partial, cuts.keeps)
    # What is stored moves equations to later stages, and nothing else.
    if stored := must_store(analysis):
        analysis = propagate(
            graph, rules, cuts.inputs, cuts.partial, cuts.keeps, stored
        )
    return analysis
