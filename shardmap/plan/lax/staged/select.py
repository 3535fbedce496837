"""What stands at given places of a sorted axis that is cut: medians and quantiles.

Where nothing but single places is taken of a sort, nothing is sorted: see `counting`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.lax import pointwise
from shardmap.plan.lax.indexed.gather import fill_value
from shardmap.plan.lax.indexed.known import counted, scalar_of
from shardmap.plan.lax.staged.counting import COUNTABLE, counted_out

MOST_PLACES = 16
"""How many places of each axis are found one by one; for more it is sorted."""


def _can_be_counted(node: Node) -> bool:
    if node.primitive is not p.sort_p or len(node.ins) > 1:
        return False
    dtype = node.ins[0].aval.dtype
    return dtype in COUNTABLE and node.in_shapes[0][node.params["dimension"]] < 2**31


def readers(graph: Graph, node: Node) -> list[Node] | None:
    """What takes single places of a sort; None if something takes more of it.

    Args:
      graph: a graph that is rewritten, by now as far as the sort.
      node: the sort.
    """
    if not _can_be_counted(node):
        return None
    [found], users = node.outs, graph.ahead()
    outputs = list(map(graph.now, graph.outputs))
    axis = node.params["dimension"]
    taking, stack = [], [(found, True)]
    while stack:
        value, is_sorted = stack.pop()
        if any(value is output for output in outputs):
            return None
        for user in users.get(value, []):
            ins = list(map(graph.now, user.ins))
            if is_sorted and _takes(ins, value) and _placed(user, axis):
                taking.append(user)
            elif user.primitive in pointwise.RULES and all(
                each is value or scalar_of(each) is not None for each in ins
            ):
                # Of each element by itself, for something that needs no order.
                stack += [(out, False) for out in user.outs]
            elif user.primitive not in ORDERLESS or axis not in user.params["axes"]:
                return None
    return taking


def _takes(ins: Sequence[Operand], value: Value) -> bool:
    """Whether a value is the first operand, and no other one."""
    return [k for k, operand in enumerate(ins) if operand is value] == [0]


ORDERLESS = frozenset(
    {
        *(p.reduce_and_p, p.reduce_max_p, p.reduce_min_p, p.reduce_or_p),
        *(p.reduce_prod_p, p.reduce_sum_p, p.reduce_xor_p),
    }
)


class PlacesTaken(NamedTuple):
    """How places are taken of a sorted axis.

    Attributes:
      places: how many, of each row along the axis.
      along: axis of the operand -> the axis of the indices that runs along it.
    """

    places: int
    along: Mapping[int, int]


def _placed(node: Node, axis: int) -> PlacesTaken | None:
    """How a node takes places; None if it takes too many, or something else."""
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


def taken(graph: Graph, node: Node, axis: int) -> Sequence[Operand]:
    """What a node takes of an operand that is not sorted, as if it were."""
    operand, *places = node.ins
    shape, params = operand.shape, node.params
    if node.primitive is p.gather_p:
        how = _Gathered(node, axis)
        [wanted] = graph.call(how.ranks, places)
        found = counted_out(graph, operand, wanted, axis)
        return graph.call(how.out, [found, *places])
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

    [wanted] = graph.call(ranks, places)
    found = counted_out(graph, operand, wanted, axis)
    return graph.call(rest, [found, *places])


class _Gathered:
    """Places as `counted_out` takes them, and its results as a ``gather`` gives."""

    def __init__(self, node: Node, axis: int) -> None:
        self.node, self.axis = node, axis
        self.shape = node.in_shapes[0]
        placed = _placed(node, axis)
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
