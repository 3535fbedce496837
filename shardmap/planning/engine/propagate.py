"""Finds which cuts reach which axes, which values are partial, and where stages end.

It visits the nodes once, first to last, and gives every axis of every value its cut. A
reduction over a cut axis leaves its result `Pending`: each shard has a part, and the
parts must be combined. Equations that commute with combining pass partial values on.
Any other equation needs the complete value: the stage ends there, and everything that
depends on the value runs in a later stage.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardmap.planning.engine.analysis import (
    Analysis,
    Ended,
    Pending,
    ReducedLoop,
    UnionFind,
    free_loop,
    loop_classes,
)
from shardmap.planning.engine.monoids import Part
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value, nbytes
from shardmap.planning.engine.rules import UNCUT, Contraction, Cut, Reason, Rule

COSTLY = 16
"""The operations that take as long as keeping a byte and reading it again."""

WORTH_KEEPING = 2**24
"""The operations that pieces repeat to have each of them wait for one result."""

FAR = 16
"""A value is kept if so many stages would compute it."""


def propagate(
    graph: Graph,
    rules: Mapping[Node, Rule],
    input_cuts: Sequence[Sequence[Cut]],
    partial: bool,
    keeps: bool = True,
    stored: Collection[Value] = (),
    classes: UnionFind | None = None,
    entering: Mapping[Operand, Pending] = MappingProxyType({}),
) -> Analysis:
    """The analysis of a graph for these cuts. The graph is not changed.

    Args:
      graph: the graph.
      rules: the rules of its nodes.
      input_cuts: the cut of each axis of each input.
      partial: whether to cut axes that are summed over.
      keeps: whether values are kept that could be computed again.
      stored: values that are kept. The equations that take them run in later stages.
      classes: which axes are one loop, if that is known.
      entering: inputs that are partial sums over the loops of these axes.
    """
    rules = {node: rules[node] for node in graph.nodes}
    if classes is None:
        classes = loop_classes(graph, rules)
    cuts: dict[Operand, Sequence[Cut]] = {
        value: [UNCUT] * len(value.shape) for value in graph.constants
    }
    cuts.update(zip(graph.inputs, input_cuts, strict=True))
    pending = {**entering}
    asked = graph, rules, classes, partial, keeps, stored
    state = _Propagation(*asked, cuts, pending)
    for node in graph.nodes:
        state.visit(node)
    state.keep_shared()
    return Analysis(
        graph=graph,
        rules=rules,
        cuts=cuts,
        classes=classes,
        pending=pending,
        level=state.level,
        kept=state.kept,
        costly=state.costly,
        reductions=state.reductions,
        ended=state.ended,
    )


@dataclass(eq=False)
class _Propagation:
    """Visits the nodes, first to last. See `propagate`."""

    graph: Graph
    rules: Mapping[Node, Rule]
    classes: UnionFind
    partial: bool
    keeps: bool
    stored: Collection[Value]
    cuts: dict[Operand, Sequence[Cut]]
    pending: dict[Operand, Pending]

    def __post_init__(self) -> None:
        self.level: dict[Operand, int] = defaultdict(int)
        self.kept: dict[Value, None] = {}
        self.costly: dict[Value, None] = {}
        self.reductions: dict[Node, list[ReducedLoop]] = {}
        self.ended: list[Ended] = []
        # The operations that computing a value in its stage takes.
        self._work: dict[Operand, int] = {}
        # The values of which no part can be computed without all of it, as of a sort.
        self._computed_whole: set[Operand] = set()

    def visit(self, node: Node) -> None:
        rule = self.rules[node]
        cuts = [self.cuts.get(v) or [UNCUT] * len(v.shape) for v in node.ins]
        forward = rule.forward(cuts)
        for lost in forward.lost:
            if lost.origins:
                self.ended.append(Ended(lost.origins, node, lost.reason))
        contracted = forward.contracted
        if not self.partial:
            for contraction in contracted:
                reason = Reason("it is summed over", "only partial=True cuts such axes")
                self.ended.append(Ended(contraction.cut.origins, node, reason))
            contracted = ()
        level, pending = self._combine(node, rule, contracted, forward.outs)
        for out, out_cuts, lacks in zip(node.outs, forward.outs, pending, strict=True):
            self.cuts[out] = out_cuts
            self.level[out] = level
            if lacks is not None:
                self.pending[out] = lacks
        # Shards of a stage compute what it keeps for later ones, too.
        here = [v for v in node.ins if v.producer and self.level[v] == level]
        work = max((self._work[v] for v in here), default=0)
        whole = self._computed_whole.intersection(node.ins)
        for k, out in enumerate(node.outs):
            if whole - self.kept.keys() or rule.whole_axes(k):
                self._computed_whole.add(out)
            self._work[out] = work + rule.operations()

    def _combine(
        self,
        node: Node,
        rule: Rule,
        contracted: Sequence[Contraction],
        outs: Sequence[Sequence[Cut]],
    ) -> tuple[int, list[Pending | None]]:
        """The stage of a node's results, and the state of each that is partial."""
        operands = [v for v in node.ins if isinstance(v, Value)]
        level = max(
            (self.level[v] + (v in self.pending and v in self.kept) for v in operands),
            default=0,
        )
        # An operand that is needed complete, or that each piece would recompute, ends
        # its stage even if it is not partial.
        complete = rule.complete | {
            k
            for k, v in enumerate(node.ins)
            if v.producer and (v in self.stored or self.rules[v.producer].runs_once)
        }
        if self.keeps:
            complete |= self._repeated(node, rule, contracted, outs)
        for number in complete:
            value = node.ins[number]
            if isinstance(value, Value) and value.producer is not None:
                self._keep(value)
                level = max(level, self.level[value] + 1)
        joint: Pending | None = None
        partial = [k for k, v in enumerate(node.ins) if v in self.pending]
        partial = [k for k in partial if self.level[node.ins[k]] == level]
        if partial:
            joint = self._joint(node, rule, partial, contracted)
            # Parts that the rule does not pass must be combined first, in this stage,
            # so that the node belongs to the next one.
            level += joint is None
        for v in operands:
            if v in self.pending and self.level[v] < level:
                self._complete(v)
        states = [joint] * len(node.outs)
        for each in contracted:
            value = node.ins[each.operand]
            assert isinstance(value, Value)
            before = {k: p.reductions for k in each.combiners if (p := states[k])}
            key = self.classes.find((value.number, each.axis))
            name = free_loop(key, {*itertools.chain(*before.values())})
            self.reductions.setdefault(node, []).append(ReducedLoop(node, each, name))
            for k, combiner in each.combiners.items():
                states[k] = Pending(combiner, (*before.get(k, ()), name))
        return level, states

    def _joint(
        self,
        node: Node,
        rule: Rule,
        partial: list[int],
        contracted: Sequence[Contraction],
    ) -> Pending | None:
        """The state of the results if all partial operands pass; None if not."""
        states = [self.pending[node.ins[k]] for k in partial]
        combiner = states[0].combiner
        # Nothing passes one array of a tuple on.
        if isinstance(combiner, Part) or {s.combiner for s in states} != {combiner}:
            return None
        passed = rule.passes(combiner, frozenset(partial))
        others = {how for each in contracted for how in each.combiners.values()}
        if passed is None or others - {passed}:
            return None
        loops = {frozenset(state.reductions) for state in states}
        return Pending(passed, states[0].reductions) if len(loops) == 1 else None

    def _complete(self, value: Value) -> None:
        """Keeps a partial value, or the one that it is cheap to compute from."""
        # For sqrt(x.sum() / n) the sum is kept, not the quotient. A value that is cheap
        # to compute from one partial value of at most its size is recomputed where it
        # is needed, and one buffer serves all such values.
        while value not in self.kept and (node := value.producer) is not None:
            sources = [v for v in node.ins if isinstance(v, Value)]
            partial = [v for v in sources if v in self.pending]
            if (
                node in self.reductions
                or len(partial) != 1
                or len(node.outs) != 1
                or partial[0].size > value.size
                or self.level[partial[0]] != self.level[value]
                or not self.rules[node].cheap
            ):
                break
            value = partial[0]
        self._keep(value)

    def _keep(self, value: Value) -> None:
        """Keeps a value, and all arrays of its tuple, which combine together."""
        state = self.pending.get(value)
        if state and value.producer and isinstance(state.combiner, Part):
            self.kept |= dict.fromkeys(value.producer.outs)
        else:
            self.kept[value] = None

    def _repeated(
        self,
        node: Node,
        rule: Rule,
        contracted: Sequence[Contraction],
        outs: Sequence[Sequence[Cut]],
    ) -> set[int]:
        """The operands that are costly, and that each piece would compute whole."""
        rows = *outs, [each.cut for each in contracted]
        pieces = max(math.prod(len(cut.at) + 1 for cut in row) for row in rows)
        loops = {
            self.classes.find((out.number, axis))
            for out, row in zip(node.outs, outs, strict=True)
            for axis, cut in enumerate(row)
            if cut.at
        }
        repeated = set()
        for k, v in enumerate(node.ins):
            if not isinstance(v, Value) or v in self.pending or k in rule.shared_out:
                continue
            is_cut = any(cut.at for cut in self.cuts[v])
            if v not in self._computed_whole:  # Pieces take a part of it.
                keys = ((v.number, axis) for axis in range(len(v.shape)))
                is_cut |= any(self.classes.find(key) in loops for key in keys)
            if not is_cut and (pieces - 1) * self._work.get(v, 0) >= WORTH_KEEPING:
                repeated.add(k)
                self.costly[v] = None
        return repeated

    def keep_shared(self) -> None:
        """Keeps values that several stages take, if computing them again costs more.

        It does if it takes `COSTLY` operations for each byte, or if many stages would
        do so. An example is the carry of an unrolled loop, which each step would
        compute again from the first step: where it is not cut, each is kept. The last
        such value is kept: of the diagonal of a product, the product is not.
        """
        stages_of: dict[Operand, set[int]] = defaultdict(set)
        for value in [*self.graph.outputs, *self.kept]:
            if isinstance(value, Value):
                stages_of[value].add(self.level[value])
        for node in reversed(self.graph.nodes):
            levels: set[int] = set()
            again = [v for v in node.ins if v.producer and v not in self.kept]
            for out in node.outs:
                stages, level = stages_of[out], self.level[out]
                is_cut = any(cut.at for cut in self.cuts[out])
                is_far = not is_cut and any(self.level[v] < level for v in again)
                is_costly = self.keeps and self._work[out] >= COSTLY * nbytes(out)
                most = 1 if is_far or is_costly else FAR
                is_kept = out in self.kept or out in self.pending
                if len(stages) > most and not is_kept:
                    self.kept[out] = self.costly[out] = None
                levels |= {level} if out in self.kept else stages
            for number, v in enumerate(node.ins):
                # Stages that share it out repeat nothing: they count as one.
                shared = number in self.rules[node].shared_out
                stages_of[v] |= {-1} if shared else levels
