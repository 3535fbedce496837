"""Reductions over parts of an axis, such as the mean of each month of a series of days.

``jnp.stack([x[i].mean(0) for i in months])`` takes rows of ``x`` for each month.
Elementwise operations commute with taking rows, so every mean reduces rows of the same
value. They are written as one scatter of its rows into groups: a shard reads its rows
once, whatever the number of groups.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.arrays.combining import identity
from shardmap.planning.engine.jaxpr_key import key_of
from shardmap.planning.engine.nodes import (
    Graph,
    Node,
    Operand,
    PlanPrimitive,
    Scalar,
    Value,
)
from shardmap.planning.engine.rules import Cut
from shardmap.planning.lax import pointwise
from shardmap.planning.lax.indexed.known import evaluated, scalar_of
from shardmap.planning.lax.staged.barrier import barrier

GROUPED = PlanPrimitive("grouped")
"""All groups of an axis. It is written once the cuts of its operand are known."""

FEWEST = 4
"""The fewest reductions over parts of one axis that are grouped."""

COMBINERS = {
    p.reduce_max_p: "max",
    p.reduce_min_p: "min",
    p.reduce_prod_p: "mul",
    p.reduce_sum_p: "add",
}

LANE = 1024
"""About how many rows are added one by one; also the most such sums of a group."""


class _Rows(NamedTuple):
    """Elementwise functions of rows of a value.

    Attributes:
      first: the first value in the graph that is computed this way, of other rows:
        ``x[p] * 2`` for every ``x[q] * 2``.
      axis: the axis of the rows.
      size: the number of rows of the whole value.
      places: which rows these are, as the bytes of 64-bit integers.
    """

    first: Value
    axis: int
    size: int
    places: bytes


class _Groups:
    """The same reduction of disjoint rows of one value.

    Attributes:
      rows: the rows of one of the reductions.
      nodes: the reductions.
      labels: the number of the reduction that takes each row, -1 if none does.
      all: all groups, once they are written, and their axis.
    """

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows
        self.nodes: list[Node] = []
        self.labels = np.full(rows.size, -1, np.int32)
        self.all: tuple[Value, int] | None = None

    def add(self, node: Node, places: np.ndarray) -> bool:
        """Adds a reduction; returns False if another one takes some of its rows."""
        if (self.labels[places] >= 0).any():
            return False
        self.labels[places] = len(self.nodes)
        self.nodes.append(node)
        return True

    def are_worth_it(self) -> bool:
        """Whether there are enough, and most of the axis is read for them anyway."""
        return len(self.nodes) >= FEWEST and (self.labels >= 0).mean() >= 0.5


class Grouping:
    """Finds the reductions over parts of an axis, and writes them as groups.

    Args:
      graph: the graph, which is not changed yet.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._rows: dict[Operand, _Rows] = {}
        # Each reduction that is grouped, and its number there.
        self._groups: dict[Node, tuple[_Groups, int]] = {}
        # The values with all their rows, once they are written.
        self._whole: dict[Value, Operand] = {}
        if sum(node.primitive in COMBINERS for node in graph.nodes) >= FEWEST:
            self._find()

    def written(self, node: Node) -> Sequence[Operand] | None:
        """Returns the operands that replace a node's results; None: it stays."""
        if node not in self._groups:
            return None
        groups, number = self._groups[node]
        if groups.all is None:
            groups.all = self._all_groups(node, groups)
        source, axis = groups.all
        # Added one by one: tracing thousands of them would take seconds.
        stops = (*source.shape[:axis], number + 1, *source.shape[axis + 1 :])
        starts = tuple(number if k == axis else 0 for k in range(len(stops)))
        params: Params = {
            "start_indices": starts,
            "limit_indices": stops,
            "strides": None,
        }
        row = source.aval.update(shape=(*stops[:axis], 1, *stops[axis + 1 :]))
        [part] = self._graph.add(p.slice_p, params, [source], [row])
        squeezed = {"dimensions": (axis,)}
        return self._graph.add(p.squeeze_p, squeezed, [part], [node.outs[0].aval])

    def _find(self) -> None:
        """Finds rows, and groups of reductions of them."""
        first: dict[Any, Value] = {}
        groups_of: dict[Any, list[_Groups]] = {}
        reductions: list[Node] = []
        # Rows that are also read alone, as the deviations from their mean.
        apart: set[Operand] = set()
        for node in self._graph.nodes:
            if rows := self._taken(node, first) or self._elementwise(node, first):
                self._rows[node.outs[0]] = rows
            elif node.primitive in COMBINERS and node.ins[0] in self._rows:
                reductions.append(node)
            else:
                apart.update(x for x in node.ins if x in self._rows)
        for out in self._rows:
            assert out.producer is not None
            if not apart.isdisjoint(out.producer.ins):
                apart.add(out)
        for node in reductions:
            rows, axes = self._rows[node.ins[0]], node.params["axes"]
            places = np.frombuffer(rows.places, np.int64)
            if (
                node.ins[0] in apart
                or rows.axis not in axes
                or node.outs[0].aval.dtype == bool
                or len(np.unique(places)) < len(places)
            ):
                continue
            same = groups_of.setdefault((rows.first, node.primitive, axes), [])
            if not any(groups.add(node, places) for groups in same):
                same.append(_Groups(rows))
                same[-1].add(node, places)
        for same in groups_of.values():
            for groups in filter(_Groups.are_worth_it, same):
                self._groups |= {n: (groups, k) for k, n in enumerate(groups.nodes)}

    def _taken(self, node: Node, first: dict[Any, Value]) -> _Rows | None:
        """The rows that a node takes of a value, or of rows of it.

        Args:
          node: the node.
          first: how rows are computed -> the first value that is computed so.
        """
        taken = _places(node)
        if taken is None:
            return None
        source, axis, places = taken
        before = self._rows.get(source)
        if before is None:
            value = first.setdefault((source, axis), node.outs[0])
            return _Rows(value, axis, source.shape[axis], places.tobytes())
        if before.axis != axis:
            return None
        places = np.frombuffer(before.places, np.int64)[places]
        return before._replace(places=places.tobytes())

    def _elementwise(self, node: Node, first: dict[Any, Value]) -> _Rows | None:
        """The rows that an elementwise operation computes from the same rows."""
        if node.primitive not in pointwise.RULES or len(node.outs) > 1:
            return None
        operands: list[_Rows] = []
        signature: list[Any] = [node.primitive, key_of(node.params)]
        for x in node.ins:
            rows, scalar = self._rows.get(x), scalar_of(x)
            if rows is not None:
                operands.append(rows)
                signature.append(rows.first)
            elif isinstance(scalar, Scalar):
                signature.append((scalar.aval, key_of(scalar.value)))
            elif scalar is not None:
                signature.append(scalar)
            else:
                return None
        if len({rows[1:] for rows in operands}) != 1:
            return None
        value = first.setdefault(tuple(signature), node.outs[0])
        return operands[0]._replace(first=value)

    def _all_groups(self, node: Node, groups: _Groups) -> tuple[Value, int]:
        """Adds all groups; returns them and their axis."""
        source, axis = self._of_all(groups.rows.first), groups.rows.axis
        if others := tuple(k for k in node.params["axes"] if k != axis):
            shape = tuple(n for k, n in enumerate(source.shape) if k not in others)
            params = {**node.params, "axes": others}
            aval = source.aval.update(shape=shape)
            [source] = self._graph.add(node.primitive, params, [source], [aval])
            axis -= sum(k < axis for k in others)
        count = len(groups.nodes)
        params = {
            "axis": axis,
            "combiner": COMBINERS[node.primitive],
            "count": count,
            "labels": groups.labels.tobytes(),
        }
        shape = (*source.shape[:axis], count, *source.shape[axis + 1 :])
        aval = source.aval.update(shape=shape)
        [grouped] = self._graph.add(GROUPED, params, [source], [aval])
        return grouped, axis

    def _of_all(self, value: Operand) -> Operand:
        """Adds the whole value for one that has some of its rows."""
        rows = self._rows[value]
        if rows.first not in self._whole:
            node, axis = rows.first.producer, rows.axis
            assert node is not None
            [whole, *_] = node.ins
            if node.primitive in pointwise.RULES:
                shape = list(rows.first.shape)
                shape[axis] = rows.size

                def spread(x: jax.Array, shape: Sequence[int] = shape) -> jax.Array:
                    return lax.broadcast_in_dim(x, shape, ())

                ins = [
                    self._of_all(x)
                    if x in self._rows
                    else self._graph.call(spread, [scalar_of(x) or x])[0]
                    for x in node.ins
                ]
                aval = rows.first.aval.update(shape=tuple(shape))
                [whole] = self._graph.add(node.primitive, node.params, ins, [aval])
            self._whole[rows.first] = whole
        return self._whole[rows.first]


def _places(node: Node) -> tuple[Value, int, np.ndarray] | None:
    """The value, axis and places, if a node takes known places of one axis."""
    params = node.params
    if not node.ins or not isinstance(source := node.ins[0], Value):
        return None
    shape = source.shape
    if node.primitive is p.slice_p:
        cut = [k for k, n in enumerate(node.out_shapes[0]) if n != shape[k]]
        if len(cut) != 1:
            return None
        [axis] = cut
        step = params["strides"][axis] if params["strides"] else 1
        ends = params["start_indices"][axis], params["limit_indices"][axis]
        return source, axis, np.arange(*ends, step, dtype=np.int64)
    if node.primitive is not p.gather_p or len(node.in_shapes[1]) != 2:
        return None
    numbers = params["dimension_numbers"]
    gone, others = [*numbers.collapsed_slice_dims], [*numbers.offset_dims]
    if len(gone) != 1 or gone != [*numbers.start_index_map]:
        return None
    [axis] = gone
    taken = (*shape[:axis], 1, *shape[axis + 1 :])
    if others != [k for k in range(len(shape)) if k != axis]:
        return None
    if tuple(params["slice_sizes"]) != taken:
        return None
    if (known := evaluated(node.ins[1])) is None or not len(known):
        return None
    places = known[:, 0].astype(np.int64)
    inside = np.all((0 <= places) & (places < shape[axis]))
    return (source, axis, places) if inside else None


def scattered(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Sequence[Operand]:
    """Writes groups, whose operand has these cuts, as a scatter."""
    axis, count, combiner = (node.params[k] for k in ("axis", "count", "combiner"))
    labels = np.frombuffer(node.params["labels"], np.int32)
    labels = np.where(labels < 0, np.int32(count), labels)
    dtype, points = node.outs[0].aval.dtype, cuts[axis].at
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    lanes = 1
    if combiner == "add" and jnp.issubdtype(dtype, jnp.inexact):
        # A scatter adds one row after the other, which loses digits in long sums.
        longest = max(np.diff([0, *points, len(labels)]).tolist())
        most = max(np.bincount(labels, minlength=count)[:count].tolist())
        lanes = min(max(most * longest // len(labels) // LANE, 1), LANE)
    # In order, pieces of the axis make pieces of the result, not parts of all of it.
    is_sorted = bool((np.diff(labels) >= 0).all()) and count > 2 * len(points)
    in_order = is_sorted and lanes == 1
    lane = np.arange(len(labels), dtype=np.int32) // count % lanes
    labels = labels * lanes + lane

    def reduced(rows: jax.Array, labels: jax.Array) -> jax.Array:
        before, after = rows.shape[:axis], rows.shape[axis + 1 :]
        if is_half and combiner in ("add", "mul"):
            rows = rows.astype(jnp.float32)  # Rounded once, as other sums are.
        start = jnp.full(
            (*before, count * lanes, *after), identity(combiner, rows.dtype)
        )
        at = start.at[(*[slice(None)] * axis, labels)]
        options = {"mode": "drop", "indices_are_sorted": in_order}
        sums = getattr(at, combiner)(rows, **options)
        if lanes > 1:
            sums = sums.reshape(*before, count, lanes, *after).sum(axis + 1)
        return sums.astype(dtype)

    [sums] = graph.call(reduced, [*node.ins, graph.constant(labels)])
    if not cuts[axis].at or not isinstance(sums, Value):
        return [sums]
    others = [k for k in range(len(sums.shape)) if k != axis]
    return [barrier(graph, sums, passing=others)]
