"""Replaces a sort by selection where only a few places of it are used.

Medians and quantiles take single places of a sorted axis: see `counting`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.lax import pointwise
from shardmap.planning.lax.indexed.gather import (
    FILL,
    batch_axes,
    fill_value,
    window_axes,
)
from shardmap.planning.lax.indexed.known import counted, scalar_of
from shardmap.planning.lax.indexed.places import as_int32
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.lax.staged.counting import COUNTABLE, counted_out

MOST_PLACES = 16
"""The most places that are selected. If more are used, the axis is sorted."""

MOST_UNCUT = 8
"""The most places of an axis that is not cut. XLA's sort is slower on CPU only."""


def readers(graph: Graph, node: Node, is_cut: bool) -> list[Node] | None:
    """The nodes that take single places of a sort; None if any takes more of it.

    Args:
      graph: a graph whose rewriting has come to the sort.
      node: the sort.
      is_cut: whether the sorted axis is cut.
    """
    if node.primitive is not p.sort_p or len(node.ins) > 1:
        return None
    [operand], axis = node.ins, node.params["dimension"]
    if operand.aval.dtype not in COUNTABLE or operand.shape[axis] >= 2**31:
        return None
    if not is_cut and jax.default_backend() != "cpu":
        return None
    [found], users = node.outs, graph.ahead()
    outputs = list(map(graph.current, graph.outputs))
    taking, places, stack = [], 0, [(found, True)]
    while stack:
        value, is_sorted = stack.pop()
        if any(value is output for output in outputs):
            return None
        for user in users.get(value, []):
            ins = list(map(graph.current, user.ins))
            is_first = [k for k, x in enumerate(ins) if x is value] == [0]
            if is_sorted and is_first and (taken := _taken(user, axis)):
                taking.append(user)
                places += taken[1]
            elif user.primitive in pointwise.RULES and all(
                each is value or scalar_of(each) is not None for each in ins
            ):
                # Elementwise, for reductions that need no order.
                stack += [(out, False) for out in user.outs]
            elif user.primitive not in COMBINERS or axis not in user.params["axes"]:
                return None
    if not is_cut and not 0 < places <= MOST_UNCUT:
        return None
    return taking


def _taken(node: Node, axis: int) -> tuple[list[int | None], int] | None:
    """What a node takes of its first operand, which is sorted along an axis.

    Returns:
      The result's axis for each axis of the operand, None for the sorted one; how many
      places of each row. None if these are too many, or it takes anything else.
    """
    shape, out = node.in_shapes[0], node.out_shapes[0]
    others = [k for k in range(len(shape)) if k != axis]
    found: list[int | None] = list(range(len(shape)))
    if node.primitive is p.gather_p:
        numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
        batch = batch_axes(node)
        batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        along = counted(node, numbers.start_index_map)
        along |= dict(zip(*batching, strict=True))
        window = dict(zip(window_axes(node), numbers.offset_dims, strict=True))
        if {*numbers.start_index_map} - {*along} != {axis} or sizes[axis] != 1:
            return None
        if any(k not in along and sizes[k] != shape[k] for k in others):
            return None
        found = [
            batch[along[k]] if k in along else window.get(k) for k in range(len(shape))
        ]
    elif node.primitive not in (p.slice_p, p.dynamic_slice_p):
        return None
    elif any(out[k] != shape[k] for k in others):
        return None
    found[axis] = None
    count = math.prod(n for k, n in enumerate(out) if k not in found)
    return (found, count) if 0 < count <= MOST_PLACES else None


def taken(graph: Graph, node: Node, axis: int, is_cut: bool) -> Sequence[Operand]:
    """Adds the elements that a node takes of a sort, selected from its operand.

    Args:
      graph: the graph.
      node: the node.
      axis: the axis along which the operand would be sorted.
      is_cut: whether that axis is cut.
    """
    operand, *places = node.ins
    params, size, [shape] = node.params, operand.shape[axis], node.out_shapes
    found = _taken(node, axis)
    assert found is not None
    fills = node.primitive is p.gather_p and params["mode"] == FILL

    def ranks(*places: jax.Array) -> jax.Array:
        if node.primitive is p.gather_p:
            numbers = params["dimension_numbers"]
            batch = batch_axes(node)
            rows = [n if k in batch else 1 for k, n in enumerate(shape)]
            column = places[0][..., numbers.start_index_map.index(axis)]
            wanted = lax.broadcast_in_dim(as_int32(column), rows, batch)
            return wanted if fills else jnp.clip(wanted, 0, size - 1)
        rows = [n if k == axis else 1 for k, n in enumerate(shape)]
        every = lax.broadcasted_iota(jnp.int32, rows, axis)
        if node.primitive is p.dynamic_slice_p:
            return every + jnp.clip(as_int32(places[axis]), 0, size - shape[axis])
        steps = params["strides"] or [1] * len(shape)
        return every * steps[axis] + params["start_indices"][axis]

    [wanted] = graph.call(ranks, places)
    made = counted_out(graph, operand, wanted, shape, found[0], is_cut)
    if not fills:
        return [made]

    def filled(found: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.where((wanted >= 0) & (wanted < size), found, fill_value(node))

    return graph.call(filled, [made, wanted])
