"""Sorting along an axis that is cut: pieces are sorted, and merged in pairs.

A stage sorts the pieces. Each of the next ones takes pairs of pieces, merges them, and
splits the result: the smaller elements to the first piece of a pair. Which pairs meet
is Batcher's odd-even merge sort, so that no shard holds more than two pieces, and all
stand where they belong after ``k * (k + 1) / 2`` stages for ``2**k`` pieces. Equal
elements stay in their order, as their places are sorted with them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from shardmap.plan.engine.slices import Box, Edges, Interval, hull_of
from shardmap.plan.lax.indexed.known import iota_of
from shardmap.plan.lax.staged.barrier import barrier

RUNS, MERGED = PlanPrimitive("sorted pieces"), PlanPrimitive("merged pairs of pieces")


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand]:
    """A sort as one of each piece, and merges of pairs of pieces."""
    axis, keys = node.params["dimension"], node.params["num_keys"]
    cut = meet([row[axis] for row in cuts])
    operands, ordered = with_places(graph, node.ins, axis, keys)
    edges = coalesced((0, *cut.at, node.in_shapes[0][axis]))
    avals = [operand.aval for operand in operands]
    shared = {"axis": axis, "keys": ordered, "origins": sorted(cut.origins)}
    params: dict[str, Any] = {**shared, "edges": edges}
    runs: Sequence[Operand] = graph.add(RUNS, params, operands, avals)
    for pairs in layers(edges):
        params = {**shared, "pairs": pairs}
        runs = graph.add(MERGED, params, [*runs, *runs], avals)
    made = runs if len(runs) == len(node.ins) else [*runs[:keys], *runs[keys + 1 :]]
    return [barrier(graph, each, cuts={axis: cut}) for each in made]


STAGES: dict[Any, Stages] = {p.sort_p: in_stages}


def with_places(
    graph: Graph, ins: Sequence[Operand], axis: int, keys: int
) -> tuple[list[Operand], int]:
    """The operands with the elements' places as the last key, and how many keys.

    Nothing is put in where the places are there, or equal elements are the same.
    """
    if len(ins) == 1 and not jnp.issubdtype(ins[0].aval.dtype, jnp.inexact):
        return [*ins], keys
    if len(ins) > keys:
        iota = iota_of(ins[keys])
        if iota is not None and iota.axis == axis:
            return [*ins], keys + 1
    shape = ins[0].shape
    dtype = jnp.int32 if shape[axis] < 2**31 else jnp.int64

    def places() -> jax.Array:
        return lax.broadcasted_iota(dtype, shape, axis)

    [found] = graph.call(places, [])
    return [*ins[:keys], found, *ins[keys:]], keys + 1


def coalesced(edges: Sequence[int]) -> tuple[int, ...]:
    """Pieces as few as can be that are not longer than the longest one.

    >>> coalesced((0, 1, 2, 6, 8))
    (0, 2, 6, 8)
    """
    longest = max(b - a for a, b in itertools.pairwise(edges))
    found = [0]
    for point, after in itertools.pairwise(edges[1:]):
        if after - found[-1] > longest:
            found.append(point)
    return (*found, edges[-1])


Pairs = tuple[tuple[Interval, Interval], ...]
"""Which intervals of what was made before are merged, one after the other."""


def layers(edges: Sequence[int]) -> Iterator[Pairs]:
    """The merges of each stage: in the last one's results all stand in their order.

    >>> list(layers((0, 2, 4)))
    [(((0, 2), (2, 4)),)]
    """
    lines: list[Interval] = list(itertools.pairwise(edges))
    longest = max(b - a for a, b in lines)
    for compared in network(len(lines)):
        partners = dict(compared)
        pairs = []
        start = 0
        new = list(lines)
        for low in range(len(lines)):
            if low in partners.values():
                continue
            first, second = lines[low], (0, 0)
            if low in partners:
                second = lines[partners[low]]
            stop = start + first[1] - first[0] + second[1] - second[0]
            middle = stop
            if low in partners:
                # A piece that is shorter is filled up by what would come last.
                middle = min(start + longest, stop)
                new[partners[low]] = middle, stop
            new[low] = start, middle
            pairs.append((first, second))
            start = stop
        lines = new
        yield tuple(pairs)


def network(count: int) -> Iterator[list[tuple[int, int]]]:
    """Batcher's odd-even merge sort: the pairs that each layer compares.

    >>> list(network(3))
    [[(0, 1)], [(0, 2)], [(1, 2)]]
    """
    merged = 1
    while merged < count:
        apart = merged
        while apart:
            yield [
                (i, i + apart)
                for j in range(apart % merged, count - apart, 2 * apart)
                for i in range(j, min(j + apart, count - apart))
                if i // (2 * merged) == (i + apart) // (2 * merged)
            ]
            apart //= 2
        merged *= 2


class _Sorted(Rule):
    """What both rules share: all axes but one pass.

    Args:
      node: the equation.
      edges: where the pieces of the results start and end.
    """

    def __init__(self, node: Node, edges: tuple[int, ...]) -> None:
        self.node = node
        self.axis: int = node.params["axis"]
        self.keys: int = node.params["keys"]
        self.count = len(node.outs)
        self._edges, self._pieces = edges, Edges(edges)

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        rank = len(self.node.out_shapes[0])
        out = [meet([row[axis] for row in cuts]) for axis in range(rank)]
        origins = frozenset(self.node.params["origins"])
        out[self.axis] = Cut(self._edges[1:-1], False, origins)
        return Forward([out] * self.count)

    def links(self) -> list[list[Link]]:
        outs = [("out", k) for k in range(self.count)]
        ins = [("in", k) for k in range(len(self.node.ins))]
        return [
            [Link(*side, axis) for side in (outs if axis == self.axis else outs + ins)]
            for axis in range(len(self.node.out_shapes[0]))
        ]

    def piece_of(self, boxes: Sequence[Box | None]) -> tuple[int, Box]:
        """The piece of the results that boxes are in: its number, and all of it."""
        box = hull_of(boxes)
        assert box is not None
        start, stop = box[self.axis]
        number = self._pieces.number(start)
        piece = self._pieces.at(number), self._pieces.at(number + 1)
        assert stop <= piece[1], "a later stage reads what this one kept"
        return number, self.along(box, piece)

    def along(self, box: Box, interval: Interval) -> Box:
        return (*box[: self.axis], interval, *box[self.axis + 1 :])

    def sort(self, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return p.sort_p.bind(
            *values, dimension=self.axis, is_stable=True, num_keys=self.keys
        )


class Runs(_Sorted):
    """Each piece, sorted."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, node.params["edges"])

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        _, piece = self.piece_of(boxes)
        shapes, begins = crops(boxes, [piece] * self.count)
        return Need((piece,) * self.count, shapes, tuple(begins))

    def emit(
        self, values: Sequence[jax.Array], static: Any, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        return crop(self.sort(values), static, starts)


class Merged(_Sorted):
    """Pairs of pieces as one sorted piece each."""

    def __init__(self, node: Node) -> None:
        self.pairs: Pairs = node.params["pairs"]
        lengths = [b - a + d - c for (a, b), (c, d) in self.pairs]
        super().__init__(node, (0, *itertools.accumulate(lengths)))
        self.complete = frozenset(range(len(node.ins)))

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        number, piece = self.piece_of(boxes)
        first, second = (self.along(piece, each) for each in self.pairs[number])
        shapes, begins = crops(boxes, [piece] * self.count)
        needed = (first,) * self.count + (second,) * self.count
        is_pair = self.pairs[number][1] != (0, 0)
        return Need(needed, (is_pair, shapes), tuple(begins))

    def emit(
        self, values: Sequence[jax.Array], static: Any, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        is_pair, shapes = static
        found = values[: self.count]
        if is_pair:
            pairs = zip(found, values[self.count :], strict=True)
            found = self.sort([lax.concatenate(pair, self.axis) for pair in pairs])
        return crop(found, shapes, starts)


RULES: dict[Any, RuleMaker] = {RUNS: Runs, MERGED: Merged}
