"""The largest along an axis that is cut: those of each piece, and the largest of these.

A stage takes the largest of every piece, and the next one those of all pieces. Equal
elements stay in their order, as pieces do.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.crop import crop, crops
from shardmap.plan.engine.nodes import (
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
    Need,
    Rule,
    RuleMaker,
    Stages,
    meet,
)
from shardmap.plan.engine.slices import Box, Interval, hull_of

EACH_PIECE, ALL_PIECES = (
    PlanPrimitive("largest of pieces"),
    PlanPrimitive("largest of all"),
)


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """The largest of each piece, and of all; None if pieces are too short for that."""
    [operand], k = node.ins, node.params["k"]
    if axis_of(node.params, operand.shape) is None:
        return None
    edges = _edges(cuts[0][-1].at, operand.shape[-1], k)
    if len(edges) < 3:
        return None
    params = {**node.params, "edges": edges}
    shape = (*operand.shape[:-1], len(edges) - 1, k)
    few = [jax.core.ShapedArray(shape, out.aval.dtype) for out in node.outs]
    found = graph.add(EACH_PIECE, params, node.ins, few)
    return graph.add(ALL_PIECES, params, found, [out.aval for out in node.outs])


STAGES: dict[Any, Stages] = {p.top_k_p: in_stages}


def axis_of(params: Mapping[str, Any], shape: Sequence[int]) -> int | None:
    """The axis along which the largest are taken, if it is the last one."""
    last = len(shape) - 1
    return last if params.get("axis", last) in (last, -1) else None


def _edges(points: Sequence[int], size: int, k: int) -> tuple[int, ...]:
    """Pieces of at least ``k`` elements, for each to have that many largest."""
    found = [0]
    for point in points:
        if point - found[-1] >= k > 0 and size - point >= k:
            found.append(point)
    return (*found, size)


class EachPiece(Rule):
    """The largest of each piece, and where they stand."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.edges: tuple[int, ...] = node.params["edges"]
        self.k: int = node.params["k"]
        self.params = {k: v for k, v in node.params.items() if k != "edges"}
        self.axis = len(node.in_shapes[0]) - 1

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        [row] = cuts
        along = UNCUT
        if row[self.axis].at:
            every = tuple(range(1, len(self.edges) - 1))
            along = Cut(every, False, row[self.axis].origins)
        out = [*row[: self.axis], along, UNCUT]
        return Forward([out, out])

    def links(self) -> list[list[Link]]:
        sides = (("out", 0), ("out", 1), ("in", 0))
        count = len(self.node.out_shapes[0])
        return [
            [Link(*side, axis) for side in (sides if axis < self.axis else sides[:2])]
            for axis in range(count)
        ]

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        box = hull_of(boxes)
        assert box is not None
        first, last = box[self.axis]
        edges = self.edges[first : last + 1]
        lengths = tuple(b - a for a, b in itertools.pairwise(edges))
        shapes, begins = crops(boxes, [(*box[:-1], (0, self.k))] * 2)
        needed = (*box[: self.axis], (edges[0], edges[-1]))
        return Need((needed,), (lengths, shapes), (edges[0], *begins))

    def emit(
        self, values: Sequence[jax.Array], static: Any, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        [value], (lengths, shapes) = values, static
        found, start = [], 0
        for length in lengths:
            part = lax.slice_in_dim(value, start, start + length, axis=self.axis)
            largest, place = p.top_k_p.bind(part, **self.params)
            place = place + jnp.asarray(starts[0] + start, place.dtype)
            found.append((largest, place))
            start += length
        outs = [jnp.stack(column, self.axis) for column in zip(*found, strict=True)]
        return crop(outs, shapes, starts[1:])


class AllPieces(Rule):
    """The largest of those of all pieces."""

    complete = frozenset({0, 1})

    def __init__(self, node: Node) -> None:
        self.node = node
        self.params = {k: v for k, v in node.params.items() if k != "edges"}
        self.axis = len(node.out_shapes[0]) - 1

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        out = [meet([row[axis] for row in cuts]) for axis in range(self.axis)]
        return Forward([[*out, UNCUT]] * 2)

    def links(self) -> list[list[Link]]:
        sides = (("in", 0), ("in", 1), ("out", 0), ("out", 1))
        return [[Link(*side, axis) for side in sides] for axis in range(self.axis)]

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        box = hull_of(boxes)
        assert box is not None
        pieces, k = self.node.in_shapes[0][-2:]
        shapes, begins = crops(boxes, [(*box[: self.axis], (0, k))] * 2)
        needed = (*box[: self.axis], (0, pieces), (0, k))
        return Need((needed, needed), shapes, tuple(begins))

    def emit(
        self, values: Sequence[jax.Array], static: Any, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        largest, places = (v.reshape(*v.shape[:-2], -1) for v in values)
        best, index = p.top_k_p.bind(largest, **self.params)
        own = jnp.take_along_axis(places, index, self.axis)
        return crop([best, own], static, starts)


RULES: dict[Any, RuleMaker] = {EACH_PIECE: EachPiece, ALL_PIECES: AllPieces}
