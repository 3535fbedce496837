"""Finds which axes of a graph are one loop, index by index, whatever is cut.

`joined_classes` also joins loops where cuts of one pass to the other, as through the
windows of a convolution, a reshape or a concatenation: an axis of an image is one class
in all layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardmap.planning.engine.nodes import Graph, Node, Value
from shardmap.planning.engine.rules import Cut, Rule

AxisKey = tuple[int, int]
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
    """Which axes of a graph are one loop, whatever is cut. See `propagate`."""
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
