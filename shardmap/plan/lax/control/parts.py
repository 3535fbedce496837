"""What a body sums over, and which of its results are parts of sums for that.

A sum in the body of a loop or branch, over an axis that is cut, gives each shard a
part. It may be carried as long as all that becomes of it commutes with combining: the
gradient of a loop adds to the gradients of its weights in every step.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.engine.rules import Cut, Factor, Link, Rule
from shardmap.plan.engine.slices import Interval
from shardmap.plan.engine.work import AxisKey, Unions


class Sum(NamedTuple):
    """A factor that a node of a body contracts.

    Attributes:
      node: the node's number.
      factor: the factor, as the node's rule calls it.
      key: an operand's axis that it runs along.
      size: how long it is.
      outs: the results that are parts, and how each combines.
    """

    node: int
    factor: Factor
    key: AxisKey
    size: int
    outs: Mapping[int, str]


class Partial(NamedTuple):
    """What a value is a part of.

    Attributes:
      combiner: how the parts become the value.
      loops: the loops whose pieces have parts.
    """

    combiner: str
    loops: frozenset[Any]


def sum_over(node: Node, rule: Rule, group: Sequence[Link]) -> Sum | None:
    """What a node sums over, of axes that are one loop; None if nothing."""
    cuts = [[Cut()] * len(shape) for shape in node.in_shapes]
    for link in group:
        if link.side == "out":
            continue
        if node.in_shapes[link.number][link.axis] < 2:
            return None
        cuts[link.number][link.axis] = Cut((1,), False, frozenset({(-1, -1)}))
    forward = rule.forward(cuts)
    if forward.lost or len(forward.contracted) != 1:
        return None
    [found] = forward.contracted
    value = node.ins[found.operand]
    if not isinstance(value, Value):
        return None
    outs = {k: how for k in range(len(node.outs)) if (how := found.of(k))}
    key = value.number, found.axis
    return Sum(node.number, found.factor, key, found.size, outs)


class Unknown:
    """The state of what is carried, until it is known what the body makes of it."""


UNKNOWN = Unknown()
State = Partial | Unknown | None


class Sums:
    """The sums of a body.

    Args:
      graph: the body.
      rules: its rules, by node number.
      unions: which of its axes are one loop.
      sums: what it sums over.
      pairs: (output, input) that are carried.
      looked: inputs that something else needs complete.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[int, Rule],
        unions: Unions,
        sums: Sequence[Sum],
        pairs: Sequence[tuple[int, int]],
        looked: Iterable[int] = (),
    ) -> None:
        self._program, self._rules, self._pairs = graph, rules, pairs
        self._looked = frozenset(looked)
        self._sums = [(each, unions.find(each.key)) for each in sums]
        self._known: dict[frozenset[Any], list[Partial | None] | None] = {}

    @property
    def loops(self) -> dict[Any, set[int]]:
        """The loops that are summed over, and how long they are."""
        found: dict[Any, set[int]] = {}
        for each, loop in self._sums:
            found.setdefault(loop, set()).add(each.size)
        return found

    def intervals(
        self, loops: Mapping[Any, Interval]
    ) -> dict[int, dict[Factor, Interval]]:
        """Which part of each contracted factor runs where loops run over a part."""
        found: dict[int, dict[Factor, Interval]] = {}
        for each, loop in self._sums:
            if loop in loops:
                found.setdefault(each.node, {})[each.factor] = loops[loop]
        return found

    def parts(self, loops: frozenset[Any]) -> list[Partial | None] | None:
        """What each output is a part of, if these loops are cut; None: they cannot be.

        A carried value that is a part enters as one.
        """
        if loops not in self._known:
            self._known[loops] = self._fixed_point(loops)
        return self._known[loops]

    def _fixed_point(self, loops: frozenset[Any]) -> list[Partial | None] | None:
        entering: dict[int, State] = {into: UNKNOWN for _, into in self._pairs}
        outs = self._outputs(loops, entering, strict=False)
        assert outs is not None
        for out, into in self._pairs:
            found = outs[out]
            entering[into] = found if isinstance(found, Partial) else None
        for _ in range(len(self._pairs) + 2):
            outs = self._outputs(loops, entering, strict=True)
            if outs is None or any(entering.get(k) for k in self._looked):
                return None
            leaving = {into: outs[out] for out, into in self._pairs}
            if leaving == entering:
                return [each if isinstance(each, Partial) else None for each in outs]
            if any(entering[k] and not leaving[k] for k in leaving):
                return None
            entering = dict(leaving)
        return None

    def _outputs(
        self, loops: frozenset[Any], entering: Mapping[int, State], strict: bool
    ) -> list[State] | None:
        """The states of the outputs; strict: None if a part goes where it may not."""
        states: dict[Value, State] = {
            self._program.inputs[k]: state for k, state in entering.items()
        }
        own: dict[int, list[tuple[Sum, Any]]] = {}
        for each, loop in self._sums:
            if loop in loops:
                own.setdefault(each.node, []).append((each, loop))

        def state(operand: Operand) -> State:
            return states.get(operand) if isinstance(operand, Value) else None

        for node in self._program.nodes:
            passed = self._passed(node, [state(v) for v in node.ins])
            if isinstance(passed, str):
                if strict:
                    return None
                passed = None
            for k, out in enumerate(node.outs):
                found: State = passed
                for each, loop in own.get(node.number, ()):
                    how = each.outs.get(k)
                    if how is None:
                        continue
                    if not isinstance(found, Partial):
                        found = Partial(how, frozenset({loop}))
                    elif found.combiner == how and loop not in found.loops:
                        found = Partial(how, found.loops | {loop})
                    elif strict:
                        return None
                states[out] = found
        return [state(output) for output in self._program.outputs]

    def _passed(self, node: Node, ins: Sequence[State]) -> State | str:
        """What the operands make of the results; a text: they may not be parts."""
        pending = {k: each for k, each in enumerate(ins) if isinstance(each, Partial)}
        unknown = {k for k, each in enumerate(ins) if isinstance(each, Unknown)}
        if not pending:
            return UNKNOWN if unknown else None
        first, *others = dict.fromkeys(pending.values())
        if others:
            return "parts of several loops"
        rule = self._rules[node.number]
        for which in ({*pending, *unknown}, {*pending}):
            combiner = rule.passes(first.combiner, frozenset(which))
            if combiner is not None:
                return Partial(combiner, first.loops)
        return "not linear"
