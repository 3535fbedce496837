"""Reductions over parts of an axis, such as the mean of each month of a series of days.

``jnp.stack([x[i].mean(0) for i in months])`` takes rows of ``x`` for each month.
Elementwise operations commute with taking rows, so every mean reduces rows of the same
value. They are written as one scatter of its rows into groups: a shard reads its rows
once, whatever the number of groups. The elementwise operations on the results, and
their stack, become operations on all groups at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.arrays.combining import identity
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

    @property
    def numbers(self) -> np.ndarray:
        return np.frombuffer(self.places, np.int64)


class _Groups:
    """The same reduction of disjoint rows of one value.

    Attributes:
      rows: the rows of one of the reductions.
      nodes: the reductions.
      labels: the number of the reduction that takes each row, -1 if none does.
      made: all groups, once they are written, and their axis.
    """

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows
        self.nodes: list[Node] = []
        self.labels = np.full(rows.size, -1, np.int32)
        self.made: tuple[Value, int] | None = None

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
        # What is written: values with all their rows, single groups, and stacks.
        self._whole: dict[Value, Operand] = {}
        self._single: dict[Operand, tuple[Value, int]] = {}
        self._stacks: dict[Any, Operand | None] = {}
        if sum(node.primitive in COMBINERS for node in graph.nodes) >= FEWEST:
            self._find()

    def written(self, node: Node) -> Sequence[Operand] | None:
        """Returns the operands that replace a node's results; None: it stays."""
        if node in self._groups:
            return [self._one_group(node, *self._groups[node])]
        if node.primitive is p.concatenate_p and self._groups:
            axis = node.params["dimension"]
            if self._are_all_rows(node.ins, axis):
                return [self._of_all(node.ins[0])]
            stacked = self._stacked(node.ins, axis, node.out_shapes[0])
            return None if stacked is None else [stacked]
        return None

    def _find(self) -> None:
        """Finds rows, and groups of reductions of them."""
        first: dict[Any, Value] = {}
        rivals_of: dict[Any, list[_Groups]] = {}
        users: dict[Operand, list[Node]] = {}
        for node in self._graph.nodes:
            for v in node.ins:
                if v in self._rows:
                    users.setdefault(v, []).append(node)
            if node.primitive in COMBINERS:
                self._group(node, rivals_of)
            elif rows := self._taken(node, first) or self._elementwise(node, first):
                self._rows[node.outs[0]] = rows
        for key, rivals in rivals_of.items():
            alike: dict[Any, _Groups] = {}
            for groups in rivals:
                if groups.are_worth_it() and not self._are_read(groups.nodes, users):
                    same = alike.setdefault((key, groups.labels.tobytes()), groups)
                    self._groups |= {n: (same, k) for k, n in enumerate(groups.nodes)}

    def _are_all_rows(self, values: Sequence[Operand], axis: int) -> bool:
        """Whether values, joined, are all rows of one value, in order."""
        rows = [self._rows[v] for v in values if v in self._rows]
        alike = {(each.first, each.axis, each.size) for each in rows}
        if len(rows) < len(values) or len(alike) != 1 or rows[0].axis != axis:
            return False
        places = np.concatenate([each.numbers for each in rows])
        return np.array_equal(places, np.arange(rows[0].size))

    def _taken(self, node: Node, first: dict[Any, Value]) -> _Rows | None:
        """The rows that a node takes of a value, or of rows of it.

        Args:
          node: the node.
          first: how rows are computed -> the first value that is computed so.
        """
        indexed = _places(node)
        if indexed is None:
            return None
        source, axis, places = indexed
        before = self._rows.get(source)
        if before is None:
            value = first.setdefault((source, axis), node.outs[0])
            return _Rows(value, axis, source.shape[axis], places.tobytes())
        if before.axis != axis:
            return None
        return before._replace(places=before.numbers[places].tobytes())

    def _elementwise(self, node: Node, first: dict[Any, Value]) -> _Rows | None:
        """The rows that an elementwise operation computes from the same rows."""
        if node.primitive not in pointwise.RULES or len(node.outs) > 1:
            return None
        operands: list[_Rows] = []
        signature: list[Any] = [node.primitive, _frozen(node.params)]
        for v in node.ins:
            rows, scalar = self._rows.get(v), scalar_of(v)
            if rows is not None and v.shape == node.out_shapes[0]:
                operands.append(rows)
                signature.append(rows.first)
            elif scalar is not None:
                signature.append(_key(scalar))
            else:
                return None
        if len({rows[1:] for rows in operands}) != 1:
            return None
        return operands[0]._replace(
            first=first.setdefault(tuple(signature), node.outs[0])
        )

    def _group(self, node: Node, groups_of: dict[Any, list[_Groups]]) -> None:
        """Adds a reduction to the groups of the same reduction of the same value."""
        rows, axes = self._rows.get(node.ins[0]), node.params["axes"]
        if rows is None or rows.axis not in axes or node.outs[0].aval.dtype == bool:
            return
        places = rows.numbers
        if len(np.unique(places)) < len(places):
            return
        same = groups_of.setdefault((rows.first, node.primitive, axes), [])
        if not any(groups.add(node, places) for groups in same):
            same.append(_Groups(rows))
            same[-1].add(node, places)

    def _are_read(
        self, reductions: Sequence[Node], users: Mapping[Operand, Sequence[Node]]
    ) -> bool:
        """Whether anything else reads rows of these, as deviations from a mean do."""
        values = [node.ins[0] for node in reductions]
        while values:
            value = values.pop()
            if value not in self._rows:
                continue
            for user in users[value]:
                if user.outs[0] not in self._rows and user.primitive not in COMBINERS:
                    return True
            if value.producer is not None:
                values += value.producer.ins
        return False

    def _one_group(self, node: Node, groups: _Groups, number: int) -> Operand:
        """Adds one group; before the first one, all of them."""
        if groups.made is None:
            groups.made = self._all_groups(node, groups)
        source, axis = groups.made
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
        [group] = self._graph.add(p.squeeze_p, squeezed, [part], [node.outs[0].aval])
        self._single[group] = source, number
        return group

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
            node, shape, axis = rows.first.producer, rows.first.shape, rows.axis
            assert node is not None
            [whole, *_] = node.ins
            if node.primitive in pointwise.RULES:
                shape = (*shape[:axis], rows.size, *shape[axis + 1 :])
                ins = [
                    self._of_all(v) if v in self._rows else self._spread(v, shape)
                    for v in node.ins
                ]
                aval = rows.first.aval.update(shape=shape)
                [whole] = self._graph.add(node.primitive, node.params, ins, [aval])
            self._whole[rows.first] = whole
        return self._whole[rows.first]

    def _stacked(
        self, values: Sequence[Operand], axis: int, shape: tuple[int, ...]
    ) -> Operand | None:
        """Adds one operation on all groups, in place of one on each; None: they differ.

        Args:
          values: one of each group, with the axis of groups, of size 1, or without it.
          axis: the axis of groups.
          shape: of the result.
        """
        key = axis, shape, tuple(map(_key, values))
        if key not in self._stacks:
            self._stacks[key] = self._stack(values, axis, shape)
        return self._stacks[key]

    def _stack(
        self, values: Sequence[Operand], axis: int, shape: tuple[int, ...]
    ) -> Operand | None:
        single = list(map(self._single.get, values))
        if single[0] is not None:
            source = single[0][0]
            in_order = single == [(source, k) for k in range(shape[axis])]
            return source if in_order and source.shape == shape else None
        scalars = [v for v in map(scalar_of, values) if v is not None]
        if len(scalars) == len(values) and len({*map(_key, scalars)}) == 1:
            return self._spread(values[0], shape)
        numbers = [v.value for v in scalars if isinstance(v, Scalar)]
        if len(numbers) == len(values):
            row = np.asarray(numbers, values[0].aval.dtype)
            return self._spread(self._graph.constant(row), shape, (axis,))
        nodes = [v.producer for v in values if v.producer]
        if len(nodes) < len(values):
            return None
        node = nodes[0]
        if len({(each.primitive, _frozen(each.params)) for each in nodes}) > 1:
            return None
        columns = [*zip(*(each.ins for each in nodes), strict=True)]
        if node.primitive is p.broadcast_in_dim_p:
            # `jax.numpy.stack` gives each value the axis of groups.
            one = (*shape[:axis], 1, *shape[axis + 1 :])
            others = [k for k in range(len(shape)) if k != axis]
            adds_axis = [*node.params["broadcast_dimensions"]] == others
            if not adds_axis or node.out_shapes != [one]:
                return None
            return self._stacked(columns[0], axis, shape)
        if node.primitive not in pointwise.RULES or len(node.outs) > 1:
            return None
        ins = [self._stacked(column, axis, shape) for column in columns]
        present = [v for v in ins if v is not None]
        if len(present) < len(ins):
            return None
        aval = node.outs[0].aval.update(shape=shape)
        return self._graph.add(node.primitive, node.params, present, [aval])[0]

    def _spread(
        self, operand: Operand, shape: tuple[int, ...], dimensions: tuple[int, ...] = ()
    ) -> Operand:
        """Adds a broadcast of one number, or of a row of them along an axis."""

        def spread(x: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(x, shape, dimensions)

        return self._graph.call(spread, [scalar_of(operand) or operand])[0]


def _frozen(params: Params) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def _key(operand: Operand) -> Any:
    if isinstance(operand, Scalar):
        return operand.aval, np.asarray(operand.value).tobytes()
    return operand


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
