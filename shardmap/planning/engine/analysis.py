"""What is known of a graph: which axes are one loop, and, for given cuts, the rest.

`loop_classes` says which axes are one loop, index by index, whatever is cut.
`joined_classes` also joins loops where cuts of one pass to the other, as through the
windows of a convolution, a reshape or a concatenation: an axis of an image is one class
in all layers. `Analysis` is the result of `propagate`.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from shardmap.planning.engine.monoids import Combiner
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.engine.rules import Contraction, Cut, Origins, Reason, Rule

AxisKey: TypeAlias = tuple[int, int]
"""An axis of a value: the value's number, and the axis."""


class UnionFind:
    """A union-find of axes: those of one class are one loop."""

    def __init__(self) -> None:
        self._parent: dict[AxisKey, AxisKey] = {}

    def find(self, key: AxisKey) -> AxisKey:
        root = key
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while key != root:
            self._parent[key], key = root, self._parent.get(key, key)
        return root

    def unite(self, a: AxisKey, b: AxisKey) -> None:
        # The smaller one becomes the root, so that two runs name loops alike.
        a, b = sorted((self.find(a), self.find(b)))
        if a != b:
            self._parent[b] = a


def loop_classes(
    graph: Graph,
    rules: Mapping[Node, Rule],
    carried: Sequence[tuple[int, int]] = (),
) -> UnionFind:
    """Which axes of a graph are one loop, whatever is cut.

    If it is the body of a loop, ``carried`` has the (output, input) pairs of which one
    becomes the other.
    """
    classes = UnionFind()
    for node in graph.nodes:
        ins, outs = rules[node].links()
        first: dict[Any, AxisKey] = {}
        for value, names in zip((*node.ins, *node.outs), (*ins, *outs), strict=True):
            for axis, name in enumerate(names):
                if name is not None and isinstance(value, Value):
                    key = value.number, axis
                    classes.unite(first.setdefault(name, key), key)
    for number, into in carried:
        if isinstance(value := graph.outputs[number], Value):
            for axis in range(len(value.shape)):
                key = graph.inputs[into].number, axis
                classes.unite((value.number, axis), key)
    return classes


JOINED = 16
"""About the pieces of the cuts that show where cuts pass."""


def joined_classes(graph: Graph, rules: Mapping[Node, Rule]) -> UnionFind:
    """The classes of a graph, joined where cuts pass from one to the other."""
    classes = loop_classes(graph, rules)
    for node in graph.nodes:
        rows = [
            [
                Cut(tuple(range(step, size, step)), True, frozenset({(k, axis)}))
                for axis, size in enumerate(operand.shape)
                for step in [max(size // JOINED, 1)]
            ]
            for k, operand in enumerate(node.ins)
        ]
        forward = rules[node].forward(rows)
        for out, row in zip(node.outs, forward.outs, strict=True):
            for axis, cut in enumerate(row):
                for k, along in cut.origins:
                    if isinstance(value := node.ins[k], Value):
                        classes.unite((value.number, along), (out.number, axis))
    return classes


LoopName: TypeAlias = tuple[AxisKey, int]
"""A class of axes, and which of the loops over it: ``x @ x.T`` needs two of them."""


def free_loop(key: AxisKey, taken: Collection[LoopName]) -> LoopName:
    """The first loop over a class of axes that is not taken."""
    return next((key, k) for k in itertools.count() if (key, k) not in taken)


class ReducedLoop(NamedTuple):
    """A loop over a contracted factor of a node.

    Attributes:
      node: the node.
      contraction: the factor, as the node's rule calls it, its size and its cut.
      loop: the loop.
    """

    node: Node
    contraction: Contraction
    loop: LoopName


class Pending(NamedTuple):
    """The state of a partial value: each shard has only a part of it.

    Attributes:
      combiner: how the parts become the value.
      reductions: the loops whose shards have the parts.
    """

    combiner: Combiner
    reductions: Collection[LoopName]


class Ended(NamedTuple):
    """A cut that stops at a node, and why."""

    origins: Origins
    node: Node
    reason: Reason


@dataclass(frozen=True, eq=False)
class Analysis:
    """The cuts, the stage and the state of every value of a graph.

    Attributes:
      graph: the graph.
      rules: the rules of its nodes.
      cuts: value -> the cuts of its axes.
      classes: which axes are one loop.
      pending: values that are partial in their stage.
      level: value -> the first stage that can compute it.
      kept: values that a later stage reads; they are results of their own stage.
      costly: the kept values that later stages could compute again.
      reductions: the loops over contracted factors, by node.
      ended: the cuts that ended.
    """

    graph: Graph
    rules: Mapping[Node, Rule]
    cuts: Mapping[Operand, Sequence[Cut]]
    classes: UnionFind
    pending: Mapping[Operand, Pending]
    level: Mapping[Operand, int]
    kept: Mapping[Value, None]
    costly: Mapping[Value, None]
    reductions: Mapping[Node, Sequence[ReducedLoop]]
    ended: Sequence[Ended]
