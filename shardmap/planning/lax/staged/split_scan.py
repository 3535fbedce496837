"""Cuts a scan along the axis it runs over: each piece of steps is a stage.

A stage starts with the values that the stage before carries. It reads the rows of its
own steps only.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap.planning.engine.nodes import Graph, Node, Operand, PlanPrimitive
from shardmap.planning.engine.rules import (
    UNCUT,
    Cut,
    Forward,
    Lost,
    Reason,
    RuleTable,
    Stages,
    meet,
)
from shardmap.planning.lax.control.loops import Scan
from shardmap.planning.lax.shape import Concatenate

PIECE, JOINED = PlanPrimitive("piece of a scan"), PlanPrimitive("steps of a scan")
MOST_PIECES = 64
"""The most pieces of a scan: each is a stage."""

IN_STAGES = Reason(
    "each piece is a stage of its own, which begins with what the one before carries",
    in_stages=True,
)


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Writes a scan as its pieces, one after the other; None if none are needed."""
    params, ins = node.params, node.ins
    consts, carries = scan_counts(params)
    if not carries:
        return None  # Its steps are cut as they are.
    first = consts + carries
    cut = meet([row[0] for row in cuts[first:]])
    step = -(-(len(cut.at) + 1) // MOST_PIECES)
    at = cut.at[step - 1 :: step]
    if not at:
        return None
    avals = [out.aval for out in node.outs]
    edges = 0, *at, params["length"]
    carry: Sequence[Operand] = ins[consts:first]
    steps: list[Sequence[Operand]] = []
    pieces = list(itertools.pairwise(edges))
    for begin, end in reversed(pieces) if params["reverse"] else pieces:
        of_piece = {**params, "length": end - begin, "first_row": begin}
        rows = [aval.update(shape=(end - begin, *aval.shape[1:])) for aval in avals]
        outs = graph.add(
            PIECE,
            of_piece,
            [*ins[:consts], *carry, *ins[first:]],
            [*avals[:carries], *rows[carries:]],
        )
        carry = outs[:carries]
        steps.append(outs[carries:])
    if params["reverse"]:
        steps.reverse()
    along = {"dimension": 0, "origins": sorted(cut.origins)}
    joined = [
        graph.add(JOINED, along, parts, [aval])[0]
        for parts, aval in zip(zip(*steps, strict=True), avals[carries:], strict=True)
    ]
    return [*carry, *joined]


STAGES: dict[Any, Stages] = {p.scan_p: in_stages}


class Piece(Scan):
    """Some steps of a scan, which start with the values that the steps before carry."""

    runs_once = True

    def __init__(self, node: Node, table: RuleTable) -> None:
        super().__init__(node, table)
        self.first_row = node.params["first_row"]
        self.shared_out = frozenset(range(self.consts + self.carries, len(node.ins)))

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        first = self.consts + self.carries
        rows = [[UNCUT, *row[1:]] for row in cuts[first:]]
        forward = super().forward([*cuts[:first], *rows])
        along = meet([row[0] for row in cuts[first:]])
        return forward._replace(lost=[*forward.lost, Lost(along.origins, IN_STAGES)])


class Joined(Concatenate):
    """The steps of all pieces, one piece after the other."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.shared_out = frozenset(range(len(node.ins)))

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        [[_, *others]] = super().forward(cuts).outs
        origins = frozenset(self.node.params["origins"])
        return Forward([[Cut(tuple(self.begins[1:]), False, origins), *others]])
