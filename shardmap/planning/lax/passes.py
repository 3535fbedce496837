"""Rewrites the graph of a function so that its cuts go as far as they can.

`ONCE` and `PASSES` are all passes, in order, and `analysed` is what drives them. What
they leave is analysed, see `propagate`. That shows which values no stage may compute
again (`must_store`).
"""

import functools
from collections.abc import Callable, Sequence

from shardmap._jax.types import AnyJaxpr
from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.jaxpr_key import share_equal
from shardmap.planning.engine.nodes import Graph, Value, flatten
from shardmap.planning.engine.propagate import propagate
from shardmap.planning.engine.rules import Rule
from shardmap.planning.lax.compared import must_store
from shardmap.planning.lax.control.rows import by_rows
from shardmap.planning.lax.follow import Cuts, Rules, follow
from shardmap.planning.lax.indexed.known import fold, known_again
from shardmap.planning.lax.staged import barrier
from shardmap.planning.lax.table import CALLS, TABLE


def cut_inside(graph: Graph, cuts: Cuts) -> None:
    """Begins the cuts of results, and of values inside, which `uncut` numbers."""
    barrier.ask(graph, cuts.outputs or ())
    barrier.recut(graph, cuts.anew)
    barrier.begin(graph, cuts.inside)


ONCE: Sequence[Callable[[Graph], None]] = (share_equal, fold, by_rows)
"""The passes that see no cuts, in order: they run once for a function.

`fold` evaluates what indices are made of, after equal equations have become one.
`by_rows` looks at which results of a loop are used."""

PASSES: Sequence[Callable[[Graph, Cuts], None]] = (cut_inside, follow)
"""The passes that see the cuts, in order. Each rewrites the graph of one analysis."""


def graph_of(closed: AnyJaxpr) -> Graph:
    """The graph of a function, after the passes that see no cuts."""
    graph = flatten(closed, CALLS)
    for rewrite in ONCE:
        rewrite(graph)
    return graph


def analysed(function: Graph, cuts: Cuts) -> Analysis:
    """The analysis of a function's graph, which stays, for these cuts."""
    graph, copies = function.copied()
    known_again(copies)
    for rewrite in PASSES:
        rewrite(graph, cuts)
    rules = Rules()
    analyse = functools.partial(
        propagate, graph, rules.rule, cuts.inputs, cuts.partial, cuts.keeps
    )
    analysis = analyse()
    # What is stored moves equations to later stages, and nothing else.
    if stored := must_store(analysis):
        analysis = analyse(stored=stored)
    return analysis


def uncut(function: Graph) -> tuple[dict[int, Rule], list[Value]]:
    """The rules of nodes; the arguments, then the values that are cut ``inside``."""
    rules = {node.number: TABLE.rule(node) for node in function.nodes}
    return rules, [*function.inputs, *barrier.begins(function)]
