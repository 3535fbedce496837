"""Rewrites the graph of a function so that its cuts go as far as they can.

`ONCE` and `PASSES` are all passes, in order, and `analysed` is what drives them. What
they leave is analysed, see `propagate`. That shows which reductions could read once
what two stages would read (`read_once`), and which values no stage may compute again
(`must_store`).
"""

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardmap._jax.types import AnyJaxpr
from shardmap.planning.engine.analysis import Analysis, Ended
from shardmap.planning.engine.factors import BESIDE
from shardmap.planning.engine.jaxpr_key import key_of
from shardmap.planning.engine.nodes import Graph, Node, Operand, Scalar, Value, flatten
from shardmap.planning.engine.propagate import propagate
from shardmap.planning.engine.rules import UNCUT, Cut, Forward, Lost, Rule
from shardmap.planning.lax import batched, reduce
from shardmap.planning.lax.compared import must_store
from shardmap.planning.lax.control import unroll
from shardmap.planning.lax.control.body import ALONG
from shardmap.planning.lax.indexed.known import fold, known_again
from shardmap.planning.lax.staged import (
    barrier,
    groups,
    one_pass,
    recut,
    split_scan,
)
from shardmap.planning.lax.table import CALLS, STAGES, TABLE


@dataclass(frozen=True)
class Cuts:
    """How a function is to be cut.

    Attributes:
      inputs: the cuts of the arguments.
      partial: whether to cut axes that are summed over.
      outputs: cuts of the results, in addition to those that reach them.
      inside: the cuts of the first values of `begins`.
      keeps: whether values may be kept that could be recomputed.
      most_equations: the most equations of a loop whose steps become stages.
    """

    inputs: Sequence[Sequence[Cut]]
    partial: bool
    outputs: Sequence[Sequence[Cut]] | None = None
    inside: Sequence[Sequence[Cut]] = ()
    keeps: bool = True
    most_equations: int = unroll.MOST_IN_STAGES


def share_equal(graph: Graph) -> None:
    """Replaces the results of an equation by those of an equal one before it.

    XLA does so too, but stages are compiled apart: the last bits of their results may
    differ, and ``f(x) >= f(x).max()`` would find nothing. It comes first, so that what
    follows sees each equation once.
    """
    known: dict[Hashable, tuple[Value, ...]] = {}

    def replaced(node: Node) -> Sequence[Operand] | None:
        ins = [key_of(x.value) if isinstance(x, Scalar) else x for x in node.ins]
        types = [x.aval for x in (*node.ins, *node.outs)]
        key = node.primitive, key_of(node.params), tuple(ins), tuple(types)
        found = known.setdefault(key, node.outs)
        return None if found is node.outs else found

    graph.rewrite(replaced)


def cut_outputs(graph: Graph, cuts: Cuts) -> None:
    """Begins the cuts of results. They only add nodes at the end."""
    if cuts.outputs is not None:
        barrier.ask(graph, cuts.outputs)


def cut_inside(graph: Graph, cuts: Cuts) -> None:
    """Begins cuts of values inside, which `uncut` numbers: before any are replaced."""
    barrier.begin(graph, cuts.inside)


def group(graph: Graph, cuts: Cuts) -> None:
    """Writes reductions of rows of one value as groups of all rows.

    It finds them by their shape, before `follow` has rewritten any for its cuts.
    """
    if cuts.partial:
        graph.rewrite(groups.Grouping(graph).written)


def follow(graph: Graph, cuts: Cuts) -> None:
    """Follows the cuts from node to node, and rewrites nodes at which they end."""
    graph.rewrite(_Follow(graph, cuts, {}))


def read_once(analysis: Analysis, cuts: Cuts) -> bool:
    """Rewrites reductions so that what two stages would read is read once.

    It needs to know which value is made in which stage, so it follows an analysis.

    Returns:
      Whether the graph is rewritten.
    """
    writers = one_pass.writers(analysis) if cuts.partial else {}

    def written(node: Node) -> Sequence[Operand] | None:
        return writers[node]() if node in writers else None

    if writers:
        analysis.graph.rewrite(written)
    return bool(writers)


ONCE: Sequence[Callable[[Graph], None]] = (share_equal, fold)
"""The passes that see no cuts, in order: they run once for a function."""

PASSES: Sequence[Callable[[Graph, Cuts], None]] = (
    cut_outputs,
    cut_inside,
    group,
    follow,
)
"""The passes that see the cuts, in order. Each rewrites the graph of one analysis."""


def graph_of(closed: AnyJaxpr) -> Graph:
    """The graph of a function, after the passes that see no cuts.

    Raises:
      Refused: it has an effect.
    """
    graph = flatten(closed, CALLS)
    for rewrite in ONCE:
        rewrite(graph)
    return graph


def analysed(function: Graph, cuts: Cuts) -> Analysis:
    """The analysis of a function for these cuts, after all passes.

    Args:
      function: its graph, see `graph_of`, which is not changed.
      cuts: how it is cut.
    """
    graph, copies = function.copied()
    known_again(copies)
    for rewrite in PASSES:
        rewrite(graph, cuts)
    rules = _Rules()
    analyse = functools.partial(
        propagate, graph, rules.rule, cuts.inputs, cuts.partial, cuts.keeps
    )
    analysis = analyse()
    if read_once(analysis, cuts):
        analysis = analyse()
    # What is stored moves equations to later stages, and nothing else.
    if stored := must_store(analysis):
        analysis = analyse(stored=stored)
    return analysis


def uncut(function: Graph) -> tuple[Analysis, list[Value]]:
    """A function without cuts, and where cuts can begin in it.

    Returns:
      Its analysis; its arguments, then the values that `analysed` cuts ``inside``.
    """
    cuts = [[UNCUT] * len(value.shape) for value in function.inputs]
    analysis = propagate(function, _Rules().rule, cuts, partial=True, keeps=False)
    return analysis, [*function.inputs, *barrier.begins(function)]


class _Rules:
    """The rules of nodes, cached for the operands that a node has."""

    def __init__(self) -> None:
        self._made: dict[Node, tuple[Sequence[Operand], Rule]] = {}

    def rule(self, node: Node) -> Rule:
        ins, rule = self._made.get(node, (None, None))
        if rule is None or ins is not node.ins:
            rule = TABLE.rule(node)
            self._made[node] = node.ins, rule
        return rule


class _Follow:
    """Follows the cuts, and rewrites nodes at which they end.

    Args:
      graph: the graph, which is rewritten.
      cuts: how it is cut.
      trials: what is known of loops; it is shared with those inside of them.
    """

    def __init__(
        self, graph: Graph, cuts: Cuts, trials: dict[Hashable, "_Trial | None"]
    ) -> None:
        self._graph, self._asked, self._trials = graph, cuts, trials
        self._rules = _Rules()
        self._cuts: dict[Operand, Sequence[Cut]] = {}
        self._cuts.update(zip(graph.inputs, cuts.inputs, strict=True))

    def __call__(self, node: Node) -> Sequence[Operand] | None:
        cuts = [self._cuts.get(x) or [UNCUT] * len(x.shape) for x in node.ins]
        if node.primitive is groups.GROUPED:
            return groups.scattered(self._graph, node, cuts[0])
        forward = self._rules.rule(node).forward(cuts)
        made = self._in_stages(node, cuts, forward) if self._asked.partial else None
        if made is None and node.primitive in unroll.PRIMITIVES:
            made = self._unrolled(node, cuts, forward.lost)
        if made is None:
            self._cuts.update(zip(node.outs, forward.outs, strict=True))
        return made

    def _in_stages(
        self, node: Node, cuts: Sequence[Sequence[Cut]], forward: Forward
    ) -> Sequence[Operand] | None:
        graph, primitive = self._graph, node.primitive
        if forward.contracted and primitive in reduce.STAGES:
            return reduce.STAGES[primitive](graph, node, cuts)
        ended = [lost.reason for lost in forward.lost if lost.origins]
        if not ended:
            return None
        if primitive in STAGES:
            made = STAGES[primitive](graph, node, cuts)
            if made is not None:
                return made
        if primitive in batched.RULES:
            return recut.in_stages(graph, node, cuts, self._rules.rule)
        return split_scan.in_stages(graph, node, cuts) if ALONG in ended else None

    def _unrolled(
        self, node: Node, cuts: Sequence[Sequence[Cut]], lost: Sequence[Lost]
    ) -> Sequence[Operand] | None:
        """Adds the steps of a loop or all branches, if fewer cuts end in them."""
        ended = {origin for each in lost if _counts(each) for origin in each.origins}
        if not ended:
            return None
        key = node.primitive, key_of(node.params), tuple(map(tuple, cuts))
        if key not in self._trials:
            self._trials[key] = self._trial(node, cuts)
        trial = self._trials[key]
        if trial is None or len(trial.ended) >= len(ended):
            return None
        most = unroll.MOST_EQUATIONS
        if trial.is_in_stages:
            most = max(most, self._asked.most_equations)
        return unroll.unrolled(self._graph, node, most)

    def _trial(self, node: Node, cuts: Sequence[Sequence[Cut]]) -> "_Trial | None":
        """What happens to the cuts in the first steps, or in the branches."""
        graph = Graph(self._graph.calls)
        ins: list[Operand] = []
        for x in node.ins:
            if isinstance(x, Value):
                value = graph.value(x.aval)
                value.constant = x.constant
                graph.inputs.append(value)
            ins.append(value if isinstance(x, Value) else x)
        avals = [out.aval for out in node.outs]
        alone = graph.node(node.primitive, node.params, ins, avals)
        outs = unroll.unrolled(graph, alone, unroll.MOST_EQUATIONS, unroll.SAMPLE)
        if outs is None:
            return None
        users = self._graph.ahead()
        results = {*map(self._graph.current, self._graph.outputs)}
        pairs = zip(outs, node.outs, strict=True)
        graph.outputs = [x for x, out in pairs if out in users or out in results]
        graph.drop_unused()
        cut = zip(node.ins, cuts, strict=True)
        rows = [row for x, row in cut if isinstance(x, Value)]
        asked = replace(self._asked, inputs=rows)
        graph.rewrite(_Follow(graph, asked, self._trials))
        made = propagate(graph, _Rules().rule, rows, asked.partial, asked.keeps)
        ended = {
            (origin, each.node.primitive, each.node.source)
            for each in made.ended
            if _counts(each)
            for origin in each.origins
        }
        last = max(
            (made.level[x] for x in graph.outputs if isinstance(x, Value)), default=0
        )
        return _Trial(ended, last >= unroll.SAMPLE - 1)


class _Trial(NamedTuple):
    """What happens to the cuts of a loop or branch that is unrolled.

    Attributes:
      ended: the cuts that end because of an operation, and where.
      is_in_stages: whether each step is a stage.
    """

    ended: Collection[Any]
    is_in_stages: bool


def _counts(each: Lost | Ended) -> bool:
    """Whether a cut ends because of what an operation is."""
    return each.reason not in (BESIDE, ALONG) and not each.reason.in_stages
