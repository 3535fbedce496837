"""Rewrites the graph of a function so that its cuts go as far as they can.

The first pass follows the cuts from node to node. Where one ends, it replaces the node
by others that can be cut: running sums, sorts or a loop become stages. The second
pass rewrites reductions so that data that two stages would read is read once. Last, the
values that no stage may compute again are stored.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from shardmap._jax.types import AnyJaxpr
from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.factors import BESIDE
from shardmap.planning.engine.jaxpr_key import key_of
from shardmap.planning.engine.nodes import Graph, Node, Operand, Scalar, Value, flatten
from shardmap.planning.engine.propagate import propagate
from shardmap.planning.engine.rules import UNCUT, Cut, Forward, Rule
from shardmap.planning.lax import batched, reduce
from shardmap.planning.lax.compared import must_store
from shardmap.planning.lax.control import unroll
from shardmap.planning.lax.control.body import ALONG
from shardmap.planning.lax.control.unroll import Unroller
from shardmap.planning.lax.indexed.known import fold
from shardmap.planning.lax.staged import (
    barrier,
    groups,
    one_pass,
    recut,
    split_scan,
)
from shardmap.planning.lax.table import CALLS, STAGES, TABLE


def analysed(
    closed: AnyJaxpr,
    cuts: list[list[Cut]],
    partial: bool,
    out_cuts: list[list[Cut]] | None = None,
    keeps: bool = True,
    most_equations: int = unroll.MOST_IN_STAGES,
    inside: Sequence[Sequence[Cut]] = (),
) -> Analysis:
    """The analysis of a function, after the passes.

    Args:
      closed: the jaxpr.
      cuts: of the arguments.
      partial: whether to cut axes that are summed over.
      out_cuts: of the results, in addition to those that reach them.
      keeps: whether values may be kept that could be recomputed.
      most_equations: the most equations of a loop whose steps become stages.
      inside: the cuts of the first values of `begins`.
    """

    def followed(unroller: Unroller | None) -> functools.partial[Analysis]:
        """Makes a graph that follows the cuts, and returns what analyses it."""
        graph = flatten(closed, CALLS)
        if out_cuts is not None:
            barrier.ask(graph, out_cuts)
        barrier.begin(graph, inside)
        graph.rewrite(_shared(graph))
        fold(graph)
        rules = _Rules()
        if partial:
            graph.rewrite(groups.Grouping(graph).written)
        if partial or unroller:
            graph.rewrite(_Follow(graph, cuts, rules, partial, unroller))
        return functools.partial(propagate, graph, rules.rule, cuts, partial, keeps)

    def finished(analysis: functools.partial[Analysis]) -> Analysis:
        """Rewrites reductions, and keeps what is worth it or has to be."""
        stored: dict[Value, None] = {}
        made = functools.partial(analysis, stored=stored)
        found = made()
        if partial and (writers := one_pass.writers(found)):
            found.graph.rewrite(functools.partial(_written, writers))
            found = made()
        while (more := must_store(found)).keys() - stored.keys():
            stored |= more
            found = made()
        return found

    of_loops = followed(None)
    graph: Graph = of_loops.args[0]
    if not any(node.primitive in unroll.PRIMITIVES for node in graph.nodes):
        return finished(of_loops)
    found = of_loops()
    if {each.node.primitive for each in found.ended}.isdisjoint(unroll.PRIMITIVES):
        return finished(of_loops)
    # Loops are unrolled if that helps, all of them: the gradient of a loop is a loop.
    unroller = Unroller(unroll.MOST_EQUATIONS, unroll.SAMPLE)
    of_steps = followed(unroller)
    trial = of_steps()
    if len(_ends(trial)) >= len(_ends(found)):
        return finished(of_loops)
    if unroller.step_ratio == 1:
        return finished(of_steps)
    in_stages = _last(trial) >= _last(found) + unroll.SAMPLE - 1
    most = most_equations if in_stages else unroll.MOST_EQUATIONS
    of_steps = followed(Unroller(most))
    return finished(
        of_steps if len(_ends(of_steps())) < len(_ends(found)) else of_loops
    )


def _shared(graph: Graph) -> Callable[[Node], Sequence[Operand] | None]:
    """Replaces the results of an equation by those of an equal one before it.

    XLA does so too, but stages are compiled apart: the last bits of their results may
    differ, and ``f(x) >= f(x).max()`` would find nothing.
    """
    known: dict[Hashable, tuple[Value, ...]] = {}

    def replaced(node: Node) -> Sequence[Operand] | None:
        ins = [key_of(x.value) if isinstance(x, Scalar) else x for x in node.ins]
        types = [x.aval for x in (*node.ins, *node.outs)]
        key = node.primitive, key_of(node.params), tuple(ins), tuple(types)
        found = known.setdefault(key, node.outs)
        return None if found is node.outs else found

    return replaced


def _written(
    writers: Mapping[Node, Callable[[], Sequence[Operand] | None]], node: Node
) -> Sequence[Operand] | None:
    return writers[node]() if node in writers else None


def _last(analysis: Analysis) -> int:
    return max(analysis.level.values(), default=0)


def uncut(closed: AnyJaxpr) -> tuple[Analysis, list[Value]]:
    """A function before its passes, without cuts, and where cuts can begin in it.

    Returns:
      Its analysis; its arguments, then the values that `analysed` cuts ``inside``.
    """
    graph = flatten(closed, CALLS)
    cuts = [[UNCUT] * len(value.shape) for value in graph.inputs]
    analysis = propagate(graph, _Rules().rule, cuts, partial=True, keeps=False)
    return analysis, [*graph.inputs, *barrier.begins(graph)]


def _ends(analysis: Analysis) -> set[Any]:
    """The cuts of arguments that end because of an operation, and where."""
    return {
        (origin, each.node.primitive, each.node.source)
        for each in analysis.ended
        if each.reason not in (BESIDE, ALONG) and not each.reason.in_stages
        for origin in each.origins
    }


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
      cuts: of its inputs.
      rules: of its nodes.
      partial: whether axes that are summed over are cut, in stages.
      unroller: unrolls loops and branches; None: they stay.
    """

    def __init__(
        self,
        graph: Graph,
        cuts: list[list[Cut]],
        rules: _Rules,
        partial: bool,
        unroller: Unroller | None,
    ) -> None:
        self._graph, self._rules = graph, rules
        self._partial, self._unroller = partial, unroller
        self._cuts: dict[Operand, list[Cut]] = {}
        self._cuts.update(zip(graph.inputs, cuts, strict=True))

    def __call__(self, node: Node) -> Sequence[Operand] | None:
        cuts = [self._cuts.get(x) or [UNCUT] * len(x.shape) for x in node.ins]
        if node.primitive is groups.GROUPED:
            return groups.scattered(self._graph, node, cuts[0])
        forward = self._rules.rule(node).forward(cuts)
        made = self._in_stages(node, cuts, forward) if self._partial else None
        is_stuck = any(lost.origins for lost in forward.lost)
        if made is None and is_stuck and node.primitive in unroll.PRIMITIVES:
            made = self._unroller(self._graph, node) if self._unroller else None
        if made is None:
            self._cuts.update(zip(node.outs, forward.outs, strict=True))
        return made

    def _in_stages(
        self, node: Node, cuts: list[list[Cut]], forward: Forward
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
