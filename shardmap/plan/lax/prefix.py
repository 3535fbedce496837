"""Running reductions along an axis that is cut: ``cumsum`` and its like.

Written as three steps, each a stage of its own: what every piece comes to, what stands
before every piece, and the running reduction of a piece that starts from there. Where
the pieces lie is known only when cuts have been followed, so that the rewriting is made
for a graph whose first analysis ended at such an equation.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.plan.engine.factors import Factors, linked_but
from shardmap.plan.engine.nodes import (
    Graph,
    Node,
    Operand,
    PlanPrimitive,
)
from shardmap.plan.engine.rules import (
    MANY,
    UNCUT,
    Cut,
    Factor,
    Forward,
    Link,
    Need,
    Reason,
    Rule,
    Stages,
    meet,
)
from shardmap.plan.engine.slices import Box, Edges, Interval

CARRIED = Reason(
    "each element depends on all before it", "cut another axis, which is independent"
)


class RunningKind(NamedTuple):
    """How a running reduction combines: a whole piece, and two results."""

    reduce: Callable[..., Any]
    join: Callable[[Any, Any], Any]
    identity: str


KINDS: Mapping[Any, RunningKind] = {
    p.cumlogsumexp_p: RunningKind(jax.nn.logsumexp, jnp.logaddexp, "logaddexp"),
    p.cummax_p: RunningKind(jnp.max, jnp.maximum, "max"),
    p.cummin_p: RunningKind(jnp.min, jnp.minimum, "min"),
    p.cumprod_p: RunningKind(jnp.prod, jnp.multiply, "mul"),
    p.cumsum_p: RunningKind(jnp.sum, jnp.add, "add"),
}


TOTALS, BEFORE, RUNNING = map(
    PlanPrimitive, ("piece totals", "totals before", "running pieces")
)


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand]:
    """A running reduction as totals of pieces, what is before each, and the pieces."""
    axis, aval = node.params["axis"], node.outs[0].aval
    edges = (0, *cuts[0][axis].at, aval.shape[axis])
    params = {**node.params, "edges": edges, "primitive": node.primitive}
    shape = list(aval.shape)
    shape[axis] = len(edges) - 1
    few = jax.core.ShapedArray(tuple(shape), _wide(aval.dtype))
    totals = graph.add(TOTALS, params, node.ins, [few])
    before = graph.add(BEFORE, params, totals, [few])
    return graph.add(RUNNING, params, [*node.ins, *before], [aval])


STAGES: dict[Any, Stages] = dict.fromkeys(KINDS, in_stages)


def _wide(dtype: np.dtype) -> np.dtype:
    """Small floats are kept in float32 and rounded once, as where they are summed."""
    small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if small else dtype


class _Pieces(Rule):
    """What the three rules share: all axes but one pass."""

    def __init__(self, node: Node) -> None:
        self.node = node
        params = node.params
        self.axis, self.edges = params["axis"], Edges(params["edges"])
        self.reverse = params["reverse"]
        self.kind = KINDS[params["primitive"]]
        self.rank = len(node.out_shapes[0])

    def other_axes(self, box: Box, interval: Interval) -> Box:
        return (*box[: self.axis], interval, *box[self.axis + 1 :])

    def others(self, cuts: Sequence[Sequence[Cut]]) -> list[Cut]:
        out = [meet([cut[axis] for cut in cuts]) for axis in range(self.rank)]
        out[self.axis] = UNCUT
        return out

    def links(self) -> list[list[Link]]:
        return linked_but(self.node, self.axis)

    def running(self, value: jax.Array) -> jax.Array:
        primitive = self.node.params["primitive"]
        wide = value.astype(_wide(value.dtype))
        return primitive.bind(wide, axis=self.axis, reverse=self.reverse)


class Totals(_Pieces):
    """What each piece comes to."""

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        out = self.others(cuts)
        along = cuts[0][self.axis]
        if along.at:
            every = tuple(range(1, self.edges.count))
            out[self.axis] = Cut(every, False, along.origins)
        return Forward([out])

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        first, last = box[self.axis]
        edges = [self.edges.at(first + k) for k in range(last - first + 1)]
        lengths = tuple(b - a for a, b in itertools.pairwise(edges))
        return Need((self.other_axes(box, (edges[0], edges[-1])),), lengths)

    def emit(
        self,
        values: Sequence[jax.Array],
        static: tuple[int, ...],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        [value] = values
        value = value.astype(_wide(value.dtype))
        found, start = [], 0
        for length in static:
            part = lax.slice_in_dim(value, start, start + length, axis=self.axis)
            total = self.kind.reduce(part, axis=self.axis, keepdims=True)
            found.append(total.astype(value.dtype))
            start += length
        return [lax.concatenate(found, self.axis)]


class Before(_Pieces):
    """What all pieces before each one come to."""

    complete = frozenset({0})

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        return Forward([self.others(cuts)])

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        start, stop = box[self.axis]
        everything = self.other_axes(box, (0, self.edges.count))
        return Need((everything,), stop - start, (start,))

    def emit(
        self, values: Sequence[jax.Array], static: int, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        [value] = values
        neutral = identity(self.kind.identity, value.dtype)
        shape = list(value.shape)
        shape[self.axis] = 1
        edge = [lax.full(shape, neutral, value.dtype)]
        found = self.running(value)
        if self.reverse:
            padded = [lax.slice_in_dim(found, 1, None, axis=self.axis), *edge]
        else:
            padded = [*edge, lax.slice_in_dim(found, 0, -1, axis=self.axis)]
        joined = lax.concatenate(padded, self.axis)
        return [lax.dynamic_slice_in_dim(joined, starts[0], static, self.axis)]


class Running(_Pieces):
    """The running reduction of a piece, from what stands before it."""

    complete = frozenset({1})

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        out = self.others(cuts)
        out[self.axis] = cuts[0][self.axis]
        return Forward([out])

    def links(self) -> list[list[Link]]:
        along = [Link("out", 0, self.axis), Link("in", 0, self.axis)]
        return [*super().links(), along]

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        start, stop = box[self.axis]
        if start == stop:
            read, number = (start, stop), 0
        elif self.reverse:
            number = self.edges.number(stop - 1)
            read = start, self.edges.at(number + 1)
        else:
            number = self.edges.number(start)
            read = self.edges.at(number), stop
        needed = self.other_axes(box, read), self.other_axes(box, (number, number + 1))
        return Need(needed, stop - start, (start - read[0],))

    def emit(
        self, values: Sequence[jax.Array], static: int, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        value, before = values
        found = self.kind.join(before, self.running(value)).astype(value.dtype)
        return [lax.dynamic_slice_in_dim(found, starts[0], static, self.axis)]


def whole(node: Node) -> Factors:
    """``i j -> i j``, the axis that is run over whole, as long as it is not cut."""
    axes = range(len(node.in_shapes[0]))
    wholes = {node.params["axis"]: CARRIED}
    return Factors(node, [axes], [axes], wholes=wholes, cheap=False, each=MANY)


RULES: dict[Any, Callable[[Node], Rule]] = {
    TOTALS: Totals,
    BEFORE: Before,
    RUNNING: Running,
    **dict.fromkeys(KINDS, whole),
}
