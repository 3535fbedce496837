"""Follows cuts from node to node, and rewrites the nodes at which they end.

All rewriters are `Stages`: they get the graph, a node and the cuts of its operands, and
add what replaces the node, or return None. `_Follow.rewriters` is the list of them.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.extend.core import primitives as p

from shardmap.planning.engine.analysis import Ended
from shardmap.planning.engine.factors import BESIDE
from shardmap.planning.engine.jaxpr_key import key_of
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.engine.propagate import propagate
from shardmap.planning.engine.rules import (
    UNCUT,
    Cut,
    Forward,
    Lost,
    Origins,
    Rule,
    Stages,
)
from shardmap.planning.lax import reduce
from shardmap.planning.lax.control import loops
from shardmap.planning.lax.control.body import ALONG
from shardmap.planning.lax.staged import matched, recut, split_scan
from shardmap.planning.lax.table import STAGES, TABLE


@dataclass(frozen=True)
class Cuts:
    """How a function is to be cut.

    Attributes:
      inputs: the cuts of the arguments.
      partial: whether to cut axes that are summed over.
      outputs: cuts of the results, in addition to those that reach them.
      inside: the cuts of the first values of `begins`.
      keeps: whether values may be kept that could be recomputed.
      anew: cuts of the results that begin when these are complete, in a later stage.
      most_equations: the most equations of a loop whose steps become stages.
    """

    inputs: Sequence[Sequence[Cut]]
    partial: bool
    outputs: Sequence[Sequence[Cut]] | None = None
    inside: Sequence[Sequence[Cut]] = ()
    keeps: bool = True
    anew: Sequence[Sequence[Cut]] = ()
    most_equations: int = loops.MOST_IN_STAGES


class Rules(dict[Node, Rule]):
    """The rules of nodes, made when they are first asked for."""

    def __missing__(self, node: Node) -> Rule:
        rule = self[node] = TABLE.rule(node)
        return rule


def follow(graph: Graph, cuts: Cuts, rules: Rules) -> Graph:
    """Follows the cuts from node to node, and rewrites nodes at which they end."""
    return graph.rewritten(_Follow(graph.inputs, cuts, rules, {}))


class _Follow:
    """Follows the cuts. What is known of loops is shared with those inside of them."""

    def __init__(
        self,
        inputs: Sequence[Value],
        cuts: Cuts,
        rules: Rules,
        trials: dict[Hashable, "_Trial | None"],
    ) -> None:
        self._asked, self._rules, self._trials = cuts, rules, trials
        self._cuts: dict[Operand, Sequence[Cut]] = {}
        self._cuts.update(zip(inputs, cuts.inputs, strict=True))
        # The reductions over cut axes that a value is made of, as bits.
        self._made_of: dict[Operand, int] = {}
        self._reductions = 0

    def __call__(self, graph: Graph, node: Node) -> Sequence[Operand] | None:
        cuts = [self._cuts.get(x) or [UNCUT] * len(x.shape) for x in node.ins]
        forward = self._rules[node].forward(cuts)
        for rewrite in self.rewriters(node, forward):
            results = rewrite(graph, node, cuts)
            if results is not None:
                return results
        self._cuts.update(zip(node.outs, forward.outs, strict=True))
        made_of = 0
        for x in node.ins:
            made_of |= self._made_of.get(x, 0)
        if forward.contracted:
            made_of |= 1 << self._reductions
            self._reductions += 1
        self._made_of |= dict.fromkeys(node.outs, made_of)
        return None

    def rewriters(self, node: Node, forward: Forward) -> Iterator[Stages]:
        """What may replace a node at which cuts end or are summed over, in order."""
        tables: list[Mapping[Any, Stages]] = []
        if self._asked.partial and forward.contracted:
            as_state = functools.partial(matched.as_state, made_of=self._made_of)
            tables += [dict.fromkeys(matched.SUMS, as_state), reduce.STAGES]
        if self._asked.partial and any(lost.origins for lost in forward.lost):
            # Its own stages; its operand kept, and cut along another axis; pieces of
            # the steps of a loop, as they are cheaper than single steps.
            tables += [STAGES, recut.STAGES, split_scan.STAGES]
        if any(map(_counts, forward.lost)):
            tables.append({p.scan_p: self._unrolled})
        for table in tables:
            if node.primitive in table:
                yield table[node.primitive]

    def _unrolled(
        self, graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
    ) -> Sequence[Operand] | None:
        """Adds the steps of a loop, if fewer cuts end in them."""
        ended = _origins_of(self._rules[node].forward(cuts).lost)
        key = node.primitive, key_of(node.params), tuple(map(tuple, cuts))
        if key not in self._trials:
            self._trials[key] = self._trial(graph, node, cuts)
        trial = self._trials[key]
        if trial is None or len(trial.ended) >= len(ended):
            return None
        most = loops.MOST_EQUATIONS
        if trial.is_in_stages:
            most = max(most, self._asked.most_equations)
        return loops.unrolled(graph, node, most)

    def _trial(
        self, outer: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
    ) -> "_Trial | None":
        """What happens to the cuts in the first steps."""
        graph = Graph(outer.calls)
        ins: list[Operand] = []
        for x in node.ins:
            if isinstance(x, Value):
                value = graph.value(x.aval)
                value.constant = x.constant
                graph.inputs.append(value)
            ins.append(value if isinstance(x, Value) else x)
        avals = [out.aval for out in node.outs]
        alone = graph.node(node.primitive, node.params, ins, avals)
        outs = loops.unrolled(graph, alone, loops.MOST_EQUATIONS, loops.SAMPLE)
        if outs is None:
            return None
        pairs = zip(outs, node.outs, strict=True)
        graph.outputs = [x for x, out in pairs if outer.users(out)]
        graph.drop_unused()
        cut = zip(node.ins, cuts, strict=True)
        rows = [row for x, row in cut if isinstance(x, Value)]
        asked = replace(self._asked, inputs=rows)
        rules = Rules()
        graph = graph.rewritten(_Follow(graph.inputs, asked, rules, self._trials))
        analysis = propagate(graph, rules, rows, asked.partial, asked.keeps)
        ended = _origins_of(analysis.ended)
        last = max(
            (analysis.level[x] for x in graph.outputs if isinstance(x, Value)),
            default=0,
        )
        return _Trial(ended, last >= loops.SAMPLE - 1)


class _Trial(NamedTuple):
    """What happens to the cuts of a loop that is unrolled."""

    ended: Origins
    is_in_stages: bool


def _origins_of(ended: Iterable[Lost | Ended]) -> Origins:
    """The cuts that end because of what operations are."""
    return frozenset().union(*(each.origins for each in filter(_counts, ended)))


def _counts(each: Lost | Ended) -> bool:
    """Whether a cut ends because of what an operation is."""
    if not each.origins:
        return False
    return each.reason not in (BESIDE, ALONG) and not each.reason.in_stages
