"""A scan that is cut along the axis it runs along: the same scan, piece by piece.

Each piece is a stage of its own, as it begins with what the one before has carried. It
reads its own steps only, so that what these are made of is there for one piece at a
time.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from shardmap._jax.primitives import scan_counts
from shardmap.plan.engine.factors import RuleTable
from shardmap.plan.engine.nodes import (
    Calls,
    Graph,
    Node,
    Operand,
    PlanPrimitive,
)
from shardmap.plan.engine.rules import (
    UNCUT,
    Cut,
    Factor,
    Forward,
    Link,
    Lost,
    Need,
    Reason,
    Rule,
    meet,
)
from shardmap.plan.engine.slices import Box, Edges, Interval
from shardmap.plan.lax.control.loops import Scan

PIECE, JOINED = PlanPrimitive("piece of a scan"), PlanPrimitive("steps of a scan")
MOST_PIECES = 64
"""Into how many pieces a scan is cut at most, as each is a stage."""

IN_STAGES = Reason(
    "each piece is a stage of its own, which begins with what the one before carries",
    in_stages=True,
)


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """A scan as one after the other of its pieces."""
    params, ins = node.params, node.ins
    consts, carries = scan_counts(params)
    first = consts + carries
    cut = meet([row[0] for row in cuts[first:]])
    step = -(-(len(cut.at) + 1) // MOST_PIECES)
    at = cut.at[step - 1 :: step]
    if not at:
        return None
    made = [out.aval for out in node.outs]
    edges = 0, *at, params["length"]
    carry: Sequence[Operand] = ins[consts:first]
    steps: list[Sequence[Operand]] = []
    pieces = list(itertools.pairwise(edges))
    for begin, end in reversed(pieces) if params["reverse"] else pieces:
        own = {**params, "length": end - begin, "first_row": begin}
        rows = [aval.update(shape=(end - begin, *aval.shape[1:])) for aval in made]
        outs = graph.add(
            PIECE,
            own,
            [*ins[:consts], *carry, *ins[first:]],
            [*made[:carries], *rows[carries:]],
        )
        carry = outs[:carries]
        steps.append(outs[carries:])
    if params["reverse"]:
        steps.reverse()
    own = {"edges": edges, "origins": sorted(cut.origins)}
    joined = [
        graph.add(JOINED, own, parts, [aval])[0]
        for parts, aval in zip(zip(*steps, strict=True), made[carries:], strict=True)
    ]
    return [*carry, *joined]


class Piece(Scan):
    """Some steps of a scan, from what those before them carry."""

    once = True

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node, table, calls)
        self.first_row = node.params["first_row"]
        self.shared_out = frozenset(range(self.consts + self.carries, len(node.ins)))

    def elements(self) -> int:
        length = self.node.params["length"]
        first = self.consts + self.carries
        rows = self.node.ins[first:]
        others = sum(x.aval.size * (1 - length / x.shape[0]) for x in rows)
        return super().elements() - int(others)

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        first = self.consts + self.carries
        rows = [[UNCUT, *row[1:]] for row in cuts[first:]]
        made = super().forward([*cuts[:first], *rows])
        along = meet([row[0] for row in cuts[first:]])
        return made._replace(lost=[*made.lost, Lost(along.origins, IN_STAGES)])


class Joined(Rule):
    """The steps of all pieces, one piece after the other."""

    cheap = True
    each = 1

    def __init__(self, node: Node) -> None:
        self.node = node
        self.edges = Edges(node.params["edges"])
        self.shared_out = frozenset(range(len(node.ins)))

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        at, origins = self.node.params["edges"][1:-1], self.node.params["origins"]
        others = [meet(each) for each in zip(*(row[1:] for row in cuts), strict=True)]
        return Forward([[Cut(at, False, frozenset(origins)), *others]])

    def links(self) -> list[list[Link]]:
        parts = range(len(self.node.ins))
        return [
            [Link("out", 0, axis), *(Link("in", k, axis) for k in parts)]
            for axis in range(1, len(self.node.out_shapes[0]))
        ]

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        (begin, end), *rest = box
        needed: list[Box | None] = []
        for k in range(len(self.node.ins)):
            first, last = self.edges.at(k), self.edges.at(k + 1)
            part = max(begin, first) - first, min(end, last) - first
            needed.append((part, *rest) if part[0] < part[1] else None)
        if not any(needed):  # An empty box still has its other axes.
            needed[0] = ((0, 0), *rest)
        return Need(tuple(needed))

    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        parts = [value for value in values if value is not None]
        return parts if len(parts) == 1 else [lax.concatenate(parts, 0)]
