"""What stands at given places of a sorted axis that is cut: medians and quantiles.

Where nothing but single places is taken of a sort, nothing is sorted: see `counting`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.types import Equation
from shardmap.plan.engine.nodes import (
    Graph,
    Node,
    Operand,
    Rewrite,
    Scalar,
    Value,
    traced,
)
from shardmap.plan.lax import pointwise
from shardmap.plan.lax.indexed.gather import fill_value
from shardmap.plan.lax.indexed.known import counted
from shardmap.plan.lax.staged.counting import COUNTABLE, counted_out

MOST_PLACES = 16
"""How many places of each axis are found one by one; for more it is sorted."""


class Selections(NamedTuple):
    """Sorts that need not be made.

    Attributes:
      sorts: by the id of their parameters.
      readers: what takes single places of them, by the id of their parameters.
    """

    sorts: Mapping[int, Node]
    readers: Mapping[int, Node]


def selections(graph: Graph, ended: Iterable[Node]) -> Selections:
    """Of sorts at which cuts end, those of which only single places are taken."""
    users: dict[Operand, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.ins:
            if isinstance(operand, Value):
                users.setdefault(operand, []).append(node)
    outputs = {each for each in graph.outputs if isinstance(each, Value)}
    sorts = {id(node.params): node for node in ended if _can_be_counted(node)}
    # An equation may stand in several places: all or none of them are written anew.
    while True:
        readers: dict[int, Node] = {}
        sort_of: dict[int, int] = {}
        known: set[int] = set()
        bad: set[int] = set()
        for node in graph.nodes:
            key = id(node.params)
            if key in sorts:
                found = _readers(node, users, outputs)
                bad |= {key} if found is None else set()
                for each in found or ():
                    readers[id(each.params)] = each
                    if sort_of.setdefault(id(each.params), key) != key:
                        bad |= {key}
                    known.add(each.number)
        for node in graph.nodes:
            if id(node.params) in readers and node.number not in known:
                bad.add(sort_of[id(node.params)])
        if not bad:
            return Selections(sorts, readers)
        sorts = {key: node for key, node in sorts.items() if key not in bad}


def _can_be_counted(node: Node) -> bool:
    if node.primitive is not p.sort_p or len(node.ins) > 1:
        return False
    dtype = node.ins[0].aval.dtype
    return dtype in COUNTABLE and node.in_shapes[0][node.params["dimension"]] < 2**31


def _readers(
    node: Node, users: Mapping[Operand, list[Node]], outputs: set[Value]
) -> list[Node] | None:
    """What takes places of a sort; None if something takes more of it."""
    [found] = node.outs
    axis = node.params["dimension"]
    readers, stack = [], [(found, True)]
    while stack:
        value, is_sorted = stack.pop()
        if value in outputs:
            return None
        for user in users.get(value, []):
            if is_sorted and _placed(user, value, axis) is not None:
                readers.append(user)
            elif user.primitive in pointwise.RULES and all(
                each is value or _is_uniform(each) for each in user.ins
            ):
                # Of each element by itself, for something that needs no order.
                stack += [(out, False) for out in user.outs]
            elif user.primitive not in ORDERLESS or axis not in user.params["axes"]:
                return None
    return readers


ORDERLESS = frozenset(
    {
        *(p.reduce_and_p, p.reduce_max_p, p.reduce_min_p, p.reduce_or_p),
        *(p.reduce_prod_p, p.reduce_sum_p, p.reduce_xor_p),
    }
)


def _is_uniform(operand: Operand) -> bool:
    """Whether all elements are known to be the same."""
    if isinstance(operand, Scalar) or not operand.shape:
        return True
    node = operand.producer
    return (
        node is not None
        and node.primitive is p.broadcast_in_dim_p
        and _is_uniform(node.ins[0])
    )


class PlacesTaken(NamedTuple):
    """How places are taken of a sorted axis.

    Attributes:
      places: how many, of each row along the axis.
      along: axis of the operand -> the axis of the indices that runs along it.
    """

    places: int
    along: Mapping[int, int]


def _placed(node: Node, operand: Operand, axis: int) -> PlacesTaken | None:
    """How a node takes places; None if it takes too many, or something else."""
    if node.ins[0] is not operand or operand in node.ins[1:]:
        return None
    shape = node.in_shapes[0]
    if node.primitive in (p.slice_p, p.dynamic_slice_p):
        count = node.out_shapes[0][axis]
        return PlacesTaken(count, {}) if 0 < count <= MOST_PLACES else None
    if node.primitive is not p.gather_p:
        return None
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    along = counted(node, numbers.start_index_map)
    along |= dict(
        zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
    )
    along.pop(axis, None)
    others = [a for a in range(len(shape)) if a != axis and a not in along]
    if (
        axis not in numbers.start_index_map
        or axis not in numbers.collapsed_slice_dims
        or any(sizes[a] != shape[a] or a in numbers.start_index_map for a in others)
    ):
        return None
    batch = node.in_shapes[1][:-1]
    count = math.prod(n for k, n in enumerate(batch) if k not in along.values())
    return PlacesTaken(count, along) if 0 < count <= MOST_PLACES else None


def rewrites(chosen: Selections) -> dict[Any, Rewrite]:
    """Leaves out the sorts, and counts for what takes places of them."""
    axes = {key: node.params["dimension"] for key, node in chosen.sorts.items()}
    axis_of = {
        key: axes[id(made.params)]
        for key, node in chosen.readers.items()
        if isinstance(v := node.ins[0], Value) and (made := v.producer) is not None
    }

    def not_sorted(
        graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
    ) -> Sequence[Operand] | None:
        return list(ins) if id(equation.params) in chosen.sorts else None

    def taken(
        graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
    ) -> Sequence[Operand] | None:
        if id(equation.params) not in chosen.readers:
            return None
        node = chosen.readers[id(equation.params)]
        return _taken(graph, node, axis_of[id(equation.params)], ins, source)

    if not chosen.sorts:
        return {}
    readers = {node.primitive for node in chosen.readers.values()}
    return {p.sort_p: not_sorted, **dict.fromkeys(readers, taken)}


def _taken(
    graph: Graph, node: Node, axis: int, ins: Sequence[Operand], source: str
) -> Sequence[Operand]:
    """What a node takes of an operand that is not sorted, as if it were."""
    operand, *places = ins
    shape, params = operand.shape, node.params
    inline = graph.inline
    if node.primitive is p.gather_p:
        how = _Gathered(node, axis)
        [wanted] = inline(traced(how.ranks, places), places, source)
        found = counted_out(graph, operand, wanted, axis, source)
        return inline(traced(how.out, [found, *places]), [found, *places], source)
    limits = list(params.get("limit_indices", shape))
    count = node.out_shapes[0][axis]
    rows = [1] * len(shape)
    rows[axis] = count

    def ranks(*starts: jax.Array) -> jax.Array:
        every = lax.broadcasted_iota(jnp.int32, rows, axis)
        if starts:
            start = jnp.clip(starts[axis], 0, shape[axis] - count)
            return every + start.astype(jnp.int32)
        steps = params["strides"] or [1] * len(shape)
        return every * steps[axis] + params["start_indices"][axis]

    def rest(found: jax.Array, *starts: jax.Array) -> jax.Array:
        if starts:
            own = list(starts)
            own[axis] = jnp.zeros_like(own[axis])
            return lax.dynamic_slice(found, own, node.out_shapes[0])
        first, steps = list(params["start_indices"]), params["strides"]
        first[axis], limits[axis] = 0, count
        if steps is not None:
            steps = [1 if k == axis else step for k, step in enumerate(steps)]
        return lax.slice(found, first, limits, steps)

    [wanted] = inline(traced(ranks, places), places, source)
    found = counted_out(graph, operand, wanted, axis, source)
    return inline(traced(rest, [found, *places]), [found, *places], source)


class _Gathered:
    """Places as `counted_out` takes them, and its results as a ``gather`` gives."""

    def __init__(self, node: Node, axis: int) -> None:
        self.node, self.axis = node, axis
        self.shape = node.in_shapes[0]
        placed = _placed(node, node.ins[0], axis)
        assert placed is not None
        self.count, along = placed
        self.along = dict(sorted(along.items()))
        self.batch = node.in_shapes[1][:-1]
        self.free = [k for k in range(len(self.batch)) if k not in along.values()]
        self.last = self.shape[axis] - 1

    def _wanted(self, indices: jax.Array) -> jax.Array:
        numbers = self.node.params["dimension_numbers"]
        wanted = indices[..., numbers.start_index_map.index(self.axis)]
        if wanted.dtype == jnp.uint32 or wanted.dtype.itemsize > 4:
            wanted = jnp.clip(wanted, -1, self.last + 1)
        return wanted.astype(jnp.int32)

    def ranks(self, indices: jax.Array) -> jax.Array:
        wanted = jnp.clip(self._wanted(indices), 0, self.last)
        wanted = wanted.transpose([*self.along.values(), *self.free])
        sizes = [self.batch[k] for k in self.along.values()]
        wanted = wanted.reshape([*sizes, self.count])
        order = sorted([*self.along, self.axis])
        now = [*self.along, self.axis]
        wanted = wanted.transpose([now.index(axis) for axis in order])
        rest = [axis for axis in range(len(self.shape)) if axis not in order]
        return lax.expand_dims(wanted, rest)

    def out(self, found: jax.Array, indices: jax.Array) -> jax.Array:
        numbers = self.node.params["dimension_numbers"]
        full = [
            axis
            for axis in range(len(self.shape))
            if axis != self.axis and axis not in self.along
        ]
        found = found.transpose([*self.along, self.axis, *full])
        sizes = [self.batch[k] for k in (*self.along.values(), *self.free)]
        found = found.reshape([*sizes, *(self.shape[axis] for axis in full)])
        place = [*self.along.values(), *self.free]
        out = [0] * found.ndim
        others = [k for k in range(found.ndim) if k not in numbers.offset_dims]
        for k, axis in enumerate(place):
            out[others[axis]] = k
        for k, axis in enumerate(numbers.offset_dims):
            out[axis] = len(place) + k
        found = found.transpose(out)
        if self.node.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
            return found
        wanted = self._wanted(indices)
        inside = (wanted >= 0) & (wanted <= self.last)
        inside = lax.broadcast_in_dim(inside, found.shape, others)
        return jnp.where(inside, found, fill_value(self.node))
