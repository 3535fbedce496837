"""Which cuts reach which axes, what is left partial, and where a stage must end.

One walk over the nodes, first to last. Every axis of every value gets its cuts. A
reduction over a cut axis leaves its result `Pending`: each shard has a part, and the
parts are to be combined. What commutes with combining passes it on; anything else needs
the complete value, so that a stage ends there, and all that depends on it is computed
in a later one.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from shardmap.plan.engine.factors import RuleTable
from shardmap.plan.engine.nodes import Node, Operand, Program, Value
from shardmap.plan.engine.rules import (
    UNCUT,
    Contraction,
    Cut,
    Factor,
    Link,
    Origins,
    Reason,
    Rule,
)

WORTH_KEEPING = 2**24
"""From how many repeated steps on a value is computed once, in a stage of its own."""

Key = tuple[int, int]
"""An axis of a value: the value's number, and the axis."""


class Unions:
    """Which axes are one and the same loop."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}

    def find(self, key: Key) -> Key:
        root = key
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while key != root:
            self._parent[key], key = root, self._parent.get(key, key)
        return root

    def unite(self, a: Key, b: Key) -> None:
        # The smaller one becomes the root, so that two runs name loops alike.
        a, b = sorted((self.find(a), self.find(b)))
        self._parent[b] = a


class Reduction(NamedTuple):
    """A loop over a contracted factor of a node.

    Attributes:
      node: the node's number.
      factor: the factor, as the node's rule calls it.
      size: the factor's size.
      key: an operand's axis that the loop runs along.
      cut: how it is cut.
    """

    node: int
    factor: Factor
    size: int
    key: Key
    cut: Cut


class Pending(NamedTuple):
    """Each shard has a part of this value only.

    Attributes:
      combiner: how the parts become the value.
      reductions: the loops whose shards have the parts, by number.
    """

    combiner: str
    reductions: tuple[int, ...]


class Ended(NamedTuple):
    """A cut that ends at a node, and why."""

    origins: Origins
    node: Node
    reason: Reason


class Analysis:
    """What is known of every value of a program.

    Attributes:
      rules: node number -> rule.
      cuts: value -> the cuts of its axes.
      classes: which axes are one loop.
      pending: values that are partial in their stage.
      level: value -> the stage that can compute it.
      kept: values that a later stage reads; they are results of their own stage.
      work: value -> the steps that it takes to compute it again from what is kept.
      divided: value -> the loops of which a part of the value takes a part of the work.
      reductions: the loops over contracted factors, by number.
      ended: the cuts that ended.
    """

    def __init__(
        self,
        program: Program,
        table: RuleTable,
        input_cuts: Sequence[Sequence[Cut]],
        partial: bool,
    ) -> None:
        self.program = program
        self.partial = partial
        self.rules: dict[int, Rule] = {}
        self.cuts: dict[Value, list[Cut]] = {}
        self.classes = Unions()
        self._same_reductions = Unions()
        self.pending: dict[Value, Pending] = {}
        self.level: dict[Value, int] = {}
        self.kept: dict[Value, None] = {}
        self.work: dict[Value, int] = {}
        self.divided: dict[Value, Counter[Key]] = {}
        self.reductions: list[Reduction] = []
        self.ended: list[Ended] = []
        for value, cuts in zip(program.inputs, input_cuts, strict=True):
            self.cuts[value] = list(cuts)
            self.level[value] = 0
        for value in program.constants:
            self.cuts[value] = [UNCUT] * len(value.shape)
            self.level[value] = 0
        windows: dict[Hashable, Key] = {}
        for node in program.nodes:
            self.rules[node.number] = table.rule(node)
            self._link(node, windows)
        for node in program.nodes:
            self._visit(node)
        for node in program.nodes:
            self._keep_costly(node)

    def _link(self, node: Node, windows: dict[Hashable, Key]) -> None:
        """Says which axes are one loop; so are those seen through equal windows."""
        rule = self.rules[node.number]
        for group in rule.links():
            keys = []
            for link in group:
                value = (node.ins if link.side == "in" else node.outs)[link.number]
                if isinstance(value, Value):
                    keys.append((value.number, link.axis))
            for key in keys[1:]:
                self.classes.unite(keys[0], key)
        for seen, through, by in rule.windows():
            value, out = node.ins[seen.number], node.outs[by.number]
            if isinstance(value, Value):
                # x[1:] and y[1:] are one loop if x and y are, though neither is the
                # loop of x: each is known by what it looks at, and how.
                source = self.classes.find((value.number, seen.axis))
                view = (source, through, out.shape[by.axis])
                key = out.number, by.axis
                self.classes.unite(windows.setdefault(view, key), key)

    def _visit(self, node: Node) -> None:
        rule = self.rules[node.number]
        cuts = [self._cuts_of(operand) for operand in node.ins]
        forward = rule.forward(cuts)
        for lost in forward.lost:
            if lost.origins:
                self.ended.append(Ended(lost.origins, node, lost.reason))
        contracted = forward.contracted
        if not self.partial:
            for contraction in contracted:
                reason = Reason("it is summed over", "partial=True would cut it")
                self.ended.append(Ended(contraction.cut.origins, node, reason))
            contracted = ()
        repeated = self._repeated(node, forward.outs)
        level, pending = self._combine(node, rule, contracted, repeated)
        for out, out_cuts in zip(node.outs, forward.outs, strict=True):
            self.cuts[out] = out_cuts
            self.level[out] = level
            if pending is not None:
                self.pending[out] = pending
        self._count(node, rule, level)

    def _count(self, node: Node, rule: Rule, level: int) -> None:
        """Counts the work of a node and of what it takes, and how it is divided."""
        work = 0 if rule.cheap else rule.steps()
        linked = {
            link
            for group in rule.links()
            if any(link.side == "in" for link in group)
            for link in group
        }
        again = [
            v
            for v in node.ins
            if isinstance(v, Value)
            and self.work.get(v)
            and self.level[v] == level
            and v not in self.kept
        ]
        for number, out in enumerate(node.outs):
            loops = Counter(
                self.classes.find((out.number, axis))
                for axis in range(len(out.shape))
                if Link("out", number, axis) in linked
            )
            for v in again:
                loops &= self.divided[v]
            self.work[out] = work + sum(self.work[v] for v in again)
            self.divided[out] = loops

    def _repeated(self, node: Node, outs: Sequence[Sequence[Cut]]) -> set[int]:
        """The operands that every shard of another loop would compute again."""
        loops: Counter[Key] = Counter()
        pieces: dict[Key, int] = {}
        for out, cuts in zip(node.outs, outs, strict=True):
            own: Counter[Key] = Counter()
            for axis, cut in enumerate(cuts):
                if cut.at:
                    key = self.classes.find((out.number, axis))
                    own[key] += 1
                    pieces[key] = len(cut.at) + 1
            loops |= own
        found = set()
        for number, v in enumerate(node.ins):
            if isinstance(v, Value) and self.work.get(v) and v not in self.pending:
                others = (loops - self.divided[v]).elements()
                times = math.prod(pieces[key] for key in others) - 1
                if times and self.work[v] * times >= WORTH_KEEPING:
                    found.add(number)
        return found

    def _cuts_of(self, operand: Operand) -> list[Cut]:
        if isinstance(operand, Value):
            return self.cuts[operand]
        return [UNCUT] * len(operand.shape)

    def _combine(
        self,
        node: Node,
        rule: Rule,
        contracted: Sequence[Contraction],
        repeated: set[int],
    ) -> tuple[int, Pending | None]:
        """The stage that a node's results belong to, and what they lack there."""
        operands = [v for v in node.ins if isinstance(v, Value)]
        level = max(
            (self.level[v] + (v in self.pending and v in self.kept) for v in operands),
            default=0,
        )
        # What is needed complete, or would be computed again and again, ends its stage
        # even if it is not partial.
        for number in rule.complete | repeated:
            value = node.ins[number]
            if isinstance(value, Value) and value.producer is not None:
                self.kept[value] = None
                level = max(level, self.level[value] + 1)
        partial = [
            k
            for k, v in enumerate(node.ins)
            if isinstance(v, Value) and v in self.pending and self.level[v] == level
        ]
        late = [v for v in operands if v in self.pending and self.level[v] < level]
        own = {contraction.combiner for contraction in contracted}
        joint = self._joint(node, rule, partial, own) if partial else None
        # Parts that the rule does not pass must be combined first, in this stage, so
        # that the node belongs to the next one.
        if partial and joint is None:
            late += [v for k in partial if isinstance(v := node.ins[k], Value)]
            level += 1
        for value in late:
            self._complete(value)
        reductions = joint.reductions if joint else ()
        combiner = joint.combiner if joint else None
        if len(own) == 1:
            combiner = own.pop()
            reductions += tuple(self._reduction(node, each) for each in contracted)
        elif own:
            raise AssertionError(f"{node.name} combines in several ways")
        if not combiner or not reductions:
            return level, None
        return level, Pending(combiner, reductions)

    def _joint(
        self, node: Node, rule: Rule, partial: list[int], own: set[str]
    ) -> Pending | None:
        """What the results lack if all partial operands pass; None if they do not."""
        states = [
            self.pending[v] for k in partial if isinstance(v := node.ins[k], Value)
        ]
        combiners = {state.combiner for state in states}
        if len(combiners) != 1:
            return None
        passed = rule.passes(combiners.pop(), frozenset(partial))
        if passed is None or (own and own != {passed}):
            return None
        first, *others = states
        for other in others:
            if not self._unite_reductions(first.reductions, other.reductions):
                return None
        return Pending(passed, first.reductions)

    def _unite_reductions(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Makes the loops of two partial values the same, if they can be."""

        def along(number: int) -> tuple[Key, int]:
            return self.classes.find(self.reductions[number].key), number

        left, right = sorted(map(along, a)), sorted(map(along, b))
        if [key for key, _ in left] != [key for key, _ in right]:
            return False
        for (_, one), (_, other) in zip(left, right, strict=True):
            self._same_reductions.unite((0, one), (0, other))
        return True

    def _reduction(self, node: Node, contraction: Contraction) -> int:
        value = node.ins[contraction.operand]
        assert isinstance(value, Value)
        key = value.number, contraction.axis
        factor, size, cut = contraction.factor, contraction.size, contraction.cut
        self.reductions.append(Reduction(node.number, factor, size, key, cut))
        return len(self.reductions) - 1

    def one_reduction(self, number: int) -> int:
        """The number that stands for all reductions that are one loop."""
        return self._same_reductions.find((0, number))[1]

    def _complete(self, value: Value) -> None:
        """Ends the value's stage with it, or with what it is easily made from."""
        # Of sqrt(x.sum() / n) the sum is kept, not the quotient: what is cheap to make
        # from one partial value that is no larger is made again where it is needed,
        # and one buffer serves all that is made of it.
        while value not in self.kept:
            node = value.producer
            assert node is not None
            sources = [v for v in node.ins if isinstance(v, Value)]
            partial = [v for v in sources if v in self.pending]
            own = any(
                self.reductions[k].node == node.number
                for k in self.pending[value].reductions
            )
            if (
                own
                or len(partial) != 1
                or len(node.outs) != 1
                or partial[0].size > value.size
                or self.level[partial[0]] != self.level[value]
                or not self.rules[node.number].cheap
            ):
                break
            value = partial[0]
        self.kept[value] = None

    def _keep_costly(self, node: Node) -> None:
        """Keeps what this node takes from earlier stages and is costly to repeat."""
        if not node.outs:
            return
        level = self.level[node.outs[0]]
        stack = [v for v in node.ins if isinstance(v, Value) and self.level[v] < level]
        seen = set(stack)
        while stack:
            value = stack.pop()
            producer = value.producer
            if producer is None or value in self.kept:
                continue
            if not self.rules[producer.number].cheap:
                self.kept[value] = None
                continue
            for source in producer.ins:
                if isinstance(source, Value) and source not in seen:
                    seen.add(source)
                    stack.append(source)
