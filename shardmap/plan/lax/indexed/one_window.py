"""Writes gathers and scatters of one window at a known place as slices and pads.

``x.at[1:-1].add(y)`` is a scatter whose only index is a literal. Where a cut would end
at it, it is written as an elementwise choice between the operand and the padded update.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import SCATTER_SUB
from shardmap._jax.types import Primitive
from shardmap.arrays.combining import COMBINE
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Graph, Node, Operand
from shardmap.plan.engine.rules import Cut, Stages
from shardmap.plan.lax.indexed.known import evaluated
from shardmap.plan.lax.indexed.scatter import COMBINERS


def _starts(
    ins: Sequence[Operand], axes: Sequence[int], taken: Sequence[int]
) -> list[int] | None:
    """Where the window starts along each axis; None: not known, or outside."""
    operand, indices = ins[0], ins[1]
    if len(indices.shape) != 1 or is_key(operand.aval):
        return None
    places = evaluated(indices)
    if places is None:
        return None
    starts = [0] * len(operand.shape)
    for axis, place in zip(axes, places.tolist(), strict=True):
        starts[axis] = place
    inside = [
        0 <= start <= size - count
        for start, size, count in zip(starts, operand.shape, taken, strict=True)
    ]
    return starts if all(inside) else None


def one_slice(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """Writes a ``gather`` of one window as a slice."""
    numbers, taken = node.params["dimension_numbers"], node.params["slice_sizes"]
    starts = _starts(node.ins, numbers.start_index_map, taken)
    if starts is None or numbers.operand_batching_dims:
        return None
    limits = [a + n for a, n in zip(starts, taken, strict=True)]
    gone = tuple(int(axis) for axis in numbers.collapsed_slice_dims)

    def sliced(x: jax.Array) -> jax.Array:
        return lax.squeeze(lax.slice(x, starts, limits), gone)

    return graph.call(sliced, node.ins[:1])


def one_update(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """Writes a ``scatter`` of one window as a pad and an elementwise choice."""
    numbers = node.params["dimension_numbers"]
    operand, _, updates = node.ins
    inserted = [int(axis) for axis in numbers.inserted_window_dims]
    if numbers.operand_batching_dims or len(numbers.update_window_dims) != len(
        updates.shape
    ):
        return None
    rest = iter(updates.shape)
    taken = [1 if k in inserted else next(rest) for k in range(len(operand.shape))]
    axes = numbers.scatter_dims_to_operand_dims
    starts = _starts(node.ins, axes, taken)
    if starts is None:
        return None
    combine = _combine(node.primitive)
    around = [
        (a, size - a - n, 0)
        for a, n, size in zip(starts, taken, operand.shape, strict=True)
    ]

    def updated(x: jax.Array, update: jax.Array) -> jax.Array:
        update = lax.expand_dims(update, inserted)
        here = lax.pad(jnp.ones(taken, bool), np.False_, around)
        update = lax.pad(update, jnp.zeros((), update.dtype), around)
        return lax.select(here, combine(x, update.astype(x.dtype)), x)

    return graph.call(updated, [operand, updates])


def _combine(primitive: Primitive) -> Callable[[Any, Any], Any]:
    """How an element is combined with its update."""
    if primitive is p.scatter_p:
        return lambda x, update: update
    return lax.sub if primitive is SCATTER_SUB else COMBINE[COMBINERS[primitive]]


STAGES: dict[Any, Stages] = {
    p.gather_p: one_slice,
    **dict.fromkeys([p.scatter_p, *COMBINERS], one_update),
}
