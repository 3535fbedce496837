"""Reductions over parts of one axis, such as the months of a series of days.

``jnp.stack([x[i].mean(0) for i in months])`` takes rows of ``x`` for each month.
Elementwise operations commute with taking rows, so all of these reduce rows of one
value. They are written as one scatter of its rows into groups. A shard then reads its
rows once, whatever the number of groups. Elementwise operations on the results, and
their stack, become operations on all groups at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap._jax.types import Aval, Params
from shardmap.arrays.combining import identity
from shardmap.plan.engine.nodes import (
    Graph,
    Node,
    Operand,
    PlanPrimitive,
    Scalar,
    Value,
)
from shardmap.plan.engine.rules import Cut
from shardmap.plan.lax import pointwise
from shardmap.plan.lax.indexed.known import evaluated, scalar_of
from shardmap.plan.lax.staged.barrier import barrier

GROUPED = PlanPrimitive("grouped")
"""All groups of an axis. It is written once the cuts of its operand are known."""

FEWEST = 4
"""How many reductions over parts of one axis there are at least, to be grouped."""

COMBINERS = {
    p.reduce_max_p: "max",
    p.reduce_min_p: "min",
    p.reduce_prod_p: "mul",
    p.reduce_sum_p: "add",
}

LANE = 1024
"""How many rows are added one after the other, and how many such sums a group has."""

METHODS = {"add": "add", "max": "max", "min": "min", "mul": "multiply"}
"""Combiner -> what JAX calls a scatter with it."""


class _Rows(NamedTuple):
    """A value that takes known places of one axis of another value.

    Attributes:
      source: the other value.
      axis: its axis.
      places: the bytes of the places, as 64-bit integers.
      squeezed: whether it takes one place, and has no such axis.
    """

    source: Value
    axis: int
    places: bytes
    squeezed: bool = False

    @property
    def length(self) -> int:
        return len(self.places) // 8


class _Groups:
    """Reductions of one value over places of an axis; no two share a place.

    Attributes:
      nodes: the reductions.
      labels: the number of the reduction of each place, -1 where there is none.
    """

    def __init__(self, size: int) -> None:
        self.nodes: list[Node] = []
        self.labels = np.full(size, -1, np.int32)

    def add(self, node: Node, rows: _Rows) -> bool:
        """Adds a reduction, or returns False if it shares a place with another one."""
        places = np.frombuffer(rows.places, np.int64)
        if (self.labels[places] >= 0).any():
            return False
        self.labels[places] = len(self.nodes)
        self.nodes.append(node)
        return True

    def are_worth_it(self) -> bool:
        """Whether there are enough, and most of the axis is read for them anyway."""
        return len(self.nodes) >= FEWEST and (self.labels >= 0).mean() >= 0.5


class Grouping:
    """Finds the reductions of a graph over parts of an axis.

    Args:
      graph: the graph, which is not changed yet.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._rows: dict[Value, _Rows] = {}
        # Nodes that are not in the graph, as by `_node`.
        self._made: dict[Any, Value] = {}
        self._missing: set[Node] = set()
        self._stacked: dict[Node, Value] = {}
        self._found: dict[tuple[Value, int, Any], list[_Groups]] = {}
        if sum(node.primitive in COMBINERS for node in graph.nodes) < FEWEST:
            return
        for node in graph.nodes:
            graph.source, graph.source_info = node.source, node.source_info
            if not self._follow(node) and node.primitive in COMBINERS:
                self._group(node)
        if self._seed():
            for node in graph.nodes:
                if node.outs and node.outs[0] not in self._rows:
                    self._follow(node)

    def written(self, node: Node) -> Sequence[Operand] | None:
        """What takes the place of a node of the graph; None: it stays."""
        if node in self._stacked:
            self._add(self._stacked[node])
            return [self._stacked[node]]
        rows = self._rows.get(node.outs[0]) if node.primitive in COMBINERS else None
        if rows is None:
            return None
        self._add(rows.source)
        [out], axis, shape = node.outs, rows.axis, rows.source.shape
        [number] = np.frombuffer(rows.places, np.int64).tolist()
        params: Params = {
            "start_indices": tuple(number * (k == axis) for k in range(len(shape))),
            "limit_indices": (*shape[:axis], number + 1, *shape[axis + 1 :]),
            "strides": None,
        }
        aval = out.aval.update(shape=(*shape[:axis], 1, *shape[axis + 1 :]))
        [row] = self._graph.add(p.slice_p, params, [rows.source], [aval])
        return self._graph.add(p.squeeze_p, {"dimensions": (axis,)}, [row], [out.aval])

    def _follow(self, node: Node) -> bool:
        """Whether a node makes rows of a value."""
        if node.primitive in pointwise.RULES:
            rows = self._elementwise(node)
        elif node.primitive is p.broadcast_in_dim_p:
            rows = self._expanded(node)
        elif node.primitive is p.concatenate_p:
            rows = None
            self._stack(node)
        else:
            rows = self._taken(node)
        if rows is not None:
            self._rows[node.outs[0]] = rows
        return rows is not None

    def _rows_at(self, operand: Operand) -> _Rows | None:
        return self._rows.get(operand) if isinstance(operand, Value) else None

    def _taken(self, node: Node) -> _Rows | None:
        """Rows that are taken of a value, or of other rows of it."""
        found = _places(node)
        if found is None:
            return None
        (axis, places), source = found, node.ins[0]
        assert isinstance(source, Value)
        before = self._rows.get(source)
        if before is None:
            return _Rows(source, axis, places.tobytes())
        if before.axis != axis or before.squeezed:
            return None
        places = np.frombuffer(before.places, np.int64)[places]
        return before._replace(places=places.tobytes())

    def _elementwise(self, node: Node) -> _Rows | None:
        """An elementwise operation on rows gives rows of the operation on all."""
        [out, *more], shape = node.outs, node.out_shapes[0]
        taken = [rows for v in node.ins if (rows := self._rows_at(v)) is not None]
        if not taken or more or len({rows[1:] for rows in taken}) > 1:
            return None
        whole = taken[0].source.shape
        ins: list[Operand] = []
        for operand in node.ins:
            rows, scalar = self._rows_at(operand), scalar_of(operand)
            if rows is not None and operand.shape == shape:
                if rows.source.shape != whole:
                    return None
                ins.append(rows.source)
            elif scalar is None:
                return None
            else:
                ins.append(self._spread(scalar, whole) if operand.shape else scalar)
        aval = out.aval.update(shape=whole)
        source = self._node(node.primitive, node.params, ins, aval)
        return taken[0]._replace(source=source)

    def _expanded(self, node: Node) -> _Rows | None:
        """A row that gets back its axis, as in a stack."""
        rows, [shape] = self._rows_at(node.ins[0]), node.out_shapes
        if rows is None or not rows.squeezed:
            return None
        others = [k for k in range(len(rows.source.shape)) if k != rows.axis]
        whole = (*shape[: rows.axis], rows.length, *shape[rows.axis + 1 :])
        if [*node.params["broadcast_dimensions"]] != others or shape != whole:
            return None
        return rows._replace(squeezed=False)

    def _stack(self, node: Node) -> None:
        """Notes a concatenation of all rows of a value, one after the other."""
        axis = node.params["dimension"]
        found = [rows for v in node.ins if (rows := self._rows_at(v)) is not None]
        if len(found) < len(node.ins) or any(
            r.squeezed or r.axis != axis for r in found
        ):
            return
        places = np.frombuffer(b"".join(rows.places for rows in found), np.int64)
        size, shape = found[0].source.shape[axis], node.out_shapes[0]
        if len(places) == size and (np.diff(places) == 1).all():
            lengths = [rows.length for rows in found]
            joined = self._joined([rows.source for rows in found], lengths, axis, shape)
            if isinstance(joined, Value):
                self._stacked[node] = joined

    def _joined(
        self,
        values: Sequence[Operand],
        lengths: Sequence[int],
        axis: int,
        shape: tuple[int, ...],
    ) -> Operand | None:
        """What has ``lengths[k]`` rows of value ``k``, if these differ in numbers."""
        first = values[0]
        if all(_key(value) == _key(first) for value in values):
            return first
        scalars = [scalar_of(value) for value in values]
        numbers = [each.value for each in scalars if isinstance(each, Scalar)]
        if len(numbers) == len(values):
            row = np.repeat(np.asarray(numbers, first.aval.dtype), lengths)
            return self._spread(self._graph.constant(row), shape, (axis,))
        nodes = [node for value in values if (node := self._maker(value)) is not None]
        alike = {(node.primitive, _frozen(node.params)) for node in nodes}
        if len(nodes) < len(values) or len(alike) > 1:
            return None
        ins = [
            joined
            for column in zip(*(node.ins for node in nodes), strict=True)
            if (joined := self._joined(column, lengths, axis, shape)) is not None
        ]
        if len(ins) < len(nodes[0].ins):
            return None
        return self._node(nodes[0].primitive, nodes[0].params, ins, first.aval)

    def _maker(self, operand: Operand) -> Node | None:
        """The node of a value that is not in the graph."""
        node = operand.producer if isinstance(operand, Value) else None
        return node if node in self._missing else None

    def _spread(
        self, operand: Operand, shape: tuple[int, ...], dimensions: tuple[int, ...] = ()
    ) -> Value:
        params = {
            "broadcast_dimensions": dimensions,
            "shape": shape,
            "sharding": None,
        }
        aval = operand.aval.update(shape=shape)
        return self._node(p.broadcast_in_dim_p, params, [operand], aval)

    def _node(
        self, primitive: Any, params: Params, ins: Sequence[Operand], aval: Aval
    ) -> Value:
        """The result of a node that is not in the graph; equal ones are the same."""
        key = primitive, _frozen(params), tuple(map(_key, ins))
        if key not in self._made:
            node = self._graph.node(primitive, params, ins, [aval])
            [self._made[key]] = node.outs
            self._missing.add(node)
        return self._made[key]

    def _add(self, value: Value) -> None:
        """Adds what a value is made of, as far as it is not in the graph."""
        node = self._maker(value)
        if node is None:
            return
        self._missing.remove(node)
        for operand in node.ins:
            if isinstance(operand, Value):
                self._add(operand)
        self._graph.nodes.append(node)

    def _group(self, node: Node) -> None:
        """Puts a reduction to those that reduce the same value the same way."""
        rows, axes = self._rows_at(node.ins[0]), node.params["axes"]
        if rows is None or rows.axis not in axes or node.outs[0].aval.dtype == bool:
            return
        if len(np.unique(np.frombuffer(rows.places, np.int64))) < rows.length:
            return
        source, axis = rows.source, rows.axis
        others = tuple(k for k in axes if k != axis)
        if others:
            shape = tuple(n for k, n in enumerate(source.shape) if k not in others)
            params = {**node.params, "axes": others}
            aval = source.aval.update(shape=shape)
            source = self._node(node.primitive, params, [source], aval)
            axis -= sum(k < axis for k in others)
        own = self._found.setdefault((source, axis, node.primitive), [])
        if not any(groups.add(node, rows) for groups in own):
            own.append(_Groups(source.shape[axis]))
            own[-1].add(node, rows)

    def _seed(self) -> bool:
        """Whether there are groups; each is then a row of what all of them make."""
        users: dict[Operand, list[Node]] = {}
        for node in self._graph.nodes:
            for operand in filter(self._rows_at, node.ins):
                users.setdefault(operand, []).append(node)
        for (source, axis, primitive), found in self._found.items():
            for groups in found:
                if not groups.are_worth_it() or self._stay(groups.nodes, users):
                    continue
                count, first = len(groups.nodes), groups.nodes[0]
                graph = self._graph
                graph.source, graph.source_info = first.source, first.source_info
                shape = (*source.shape[:axis], count, *source.shape[axis + 1 :])
                params = {
                    "axis": axis,
                    "combiner": COMBINERS[primitive],
                    "count": count,
                    "labels": groups.labels.tobytes(),
                }
                aval = source.aval.update(shape=shape)
                made = self._node(GROUPED, params, [source], aval)
                for number, node in enumerate(groups.nodes):
                    place = np.int64(number).tobytes()
                    self._rows[node.outs[0]] = _Rows(made, axis, place, squeezed=True)
        return bool(self._rows)

    def _stay(
        self, reductions: Sequence[Node], users: Mapping[Operand, Sequence[Node]]
    ) -> bool:
        """Whether something else reads the rows of reductions, as a deviation does."""
        rows = [node.ins[0] for node in reductions]
        while rows:
            value = rows.pop()
            for user in users.get(value, ()):
                if user.outs[0] not in self._rows and user.primitive not in COMBINERS:
                    return True
            if isinstance(value, Value) and value.producer is not None:
                rows += filter(self._rows_at, value.producer.ins)
        return False


def _frozen(params: Params) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def _key(operand: Operand) -> Any:
    if isinstance(operand, Scalar):
        return operand.aval, np.asarray(operand.value).tobytes()
    return operand


def _places(node: Node) -> tuple[int, np.ndarray] | None:
    """The one axis of its operand of which a node takes known places, and these."""
    if not node.ins or not isinstance(node.ins[0], Value):
        return None
    shape = node.in_shapes[0]
    if node.primitive is p.slice_p:
        params = node.params
        cut = [k for k, n in enumerate(node.out_shapes[0]) if n != shape[k]]
        if len(cut) != 1:
            return None
        [axis] = cut
        step = params["strides"][axis] if params["strides"] else 1
        ends = params["start_indices"][axis], params["limit_indices"][axis]
        places = np.arange(*ends, step, dtype=np.int64)
    elif node.primitive is p.gather_p:
        numbers = node.params["dimension_numbers"]
        if len(numbers.start_index_map) != 1 or len(node.in_shapes[1]) != 2:
            return None
        [axis] = numbers.start_index_map
        if (
            tuple(numbers.collapsed_slice_dims) != (axis,)
            or tuple(numbers.offset_dims)
            != tuple(k for k in range(len(shape)) if k != axis)
            or tuple(node.params["slice_sizes"])
            != (*shape[:axis], 1, *shape[axis + 1 :])
            or (known := evaluated(node.ins[1])) is None
        ):
            return None
        places = known[:, 0].astype(np.int64)
    else:
        return None
    inside = len(places) and places.min() >= 0 and places.max() < shape[axis]
    return (axis, places) if inside else None


def scattered(graph: Graph, node: Node, cuts: Sequence[Cut]) -> Sequence[Operand]:
    """Writes groups as a scatter.

    Args:
      graph: the graph.
      node: the groups.
      cuts: those of its operand.
    """
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
        made = getattr(at, METHODS[combiner])(rows, **options)
        if lanes > 1:
            made = made.reshape(*before, count, lanes, *after).sum(axis + 1)
        return made.astype(dtype)

    [made] = graph.call(reduced, [*node.ins, graph.constant(labels)])
    if not cuts[axis].at or not isinstance(made, Value):
        return [made]
    others = [k for k in range(len(made.shape)) if k != axis]
    return [barrier(graph, made, passing=others)]
