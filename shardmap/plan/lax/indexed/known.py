"""One window at a known place: a slice, or an update of one.

``x.at[1:-1].add(y)`` is a scatter whose only index is a literal. Where a cut would end
at it, it is written as what becomes of each element.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import SCATTER_SUB
from shardmap._jax.types import Equation
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Graph, Operand, Scalar, traced


def known_places(graph: Graph, operand: Operand) -> list[int] | None:
    """The elements of a small vector of indices; None if they are not known."""
    if isinstance(operand, Scalar):
        return _numbers(operand.value)
    if len(operand.shape) > 1 or operand.size > MOST_PLACES:
        return None
    if operand in graph.constants:
        return _numbers(graph.constants[operand])
    node = operand.producer
    if node is None or not jnp.issubdtype(operand.aval.dtype, jnp.integer):
        return None
    if node.primitive is p.concatenate_p:
        parts = [known_places(graph, each) for each in node.ins]
        if any(part is None for part in parts):
            return None
        return [n for part in parts for n in part or ()]
    if node.primitive is not p.broadcast_in_dim_p or len(node.ins) != 1:
        return None
    found = known_places(graph, node.ins[0])
    return found * operand.size if found is not None and len(found) == 1 else found


MOST_PLACES = 16


def _numbers(array: Any) -> list[int] | None:
    if isinstance(array, jax.core.Tracer):
        return None  # Of a function around this one.
    return [int(n) for n in np.asarray(array).reshape(-1)]


def _starts(
    graph: Graph, ins: Sequence[Operand], axes: Sequence[int], taken: Sequence[int]
) -> list[int] | None:
    """Where the only window starts along each axis; None: not known, or outside."""
    operand, indices = ins[0], ins[1]
    if len(indices.shape) != 1 or is_key(operand.aval):
        return None
    places = known_places(graph, indices)
    if places is None or len(places) != len(axes):
        return None
    starts = [0] * len(operand.shape)
    for axis, place in zip(axes, places, strict=True):
        starts[axis] = place
    inside = [
        0 <= start <= size - count
        for start, size, count in zip(starts, operand.shape, taken, strict=True)
    ]
    return starts if all(inside) else None


def one_slice(
    graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
) -> list[Operand] | None:
    """A ``gather`` of one window."""
    numbers, taken = (
        equation.params["dimension_numbers"],
        equation.params["slice_sizes"],
    )
    starts = _starts(graph, ins, numbers.start_index_map, taken)
    if starts is None or numbers.operand_batching_dims:
        return None
    limits = [a + n for a, n in zip(starts, taken, strict=True)]
    gone = tuple(int(axis) for axis in numbers.collapsed_slice_dims)

    def sliced(x: jax.Array) -> jax.Array:
        return lax.squeeze(lax.slice(x, starts, limits), gone)

    return graph.inline(traced(sliced, ins[:1]), ins[:1], source)


def one_update(
    graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
) -> list[Operand] | None:
    """A ``scatter`` of one window."""
    numbers = equation.params["dimension_numbers"]
    operand, _, updates = ins
    inserted = [int(axis) for axis in numbers.inserted_window_dims]
    if numbers.operand_batching_dims or len(numbers.update_window_dims) != len(
        updates.shape
    ):
        return None
    rest = iter(updates.shape)
    taken = [1 if k in inserted else next(rest) for k in range(len(operand.shape))]
    axes = numbers.scatter_dims_to_operand_dims
    starts = _starts(graph, ins, axes, taken)
    if starts is None:
        return None
    combine = COMBINE[equation.primitive]
    spans = [
        (k, a, a + n)
        for k, (a, n) in enumerate(zip(starts, taken, strict=True))
        if n != operand.shape[k]
    ]

    def updated(x: jax.Array, update: jax.Array) -> jax.Array:
        config = [
            (a, size - a - n, 0)
            for a, n, size in zip(starts, taken, x.shape, strict=True)
        ]
        zero = jnp.zeros((), update.dtype)
        update = lax.pad(lax.expand_dims(update, inserted), zero, config)
        new = combine(x, update.astype(x.dtype))
        here = jnp.ones(x.shape, bool)
        for axis, start, stop in spans:
            place = lax.broadcasted_iota(jnp.int32, x.shape, axis)
            here = here & (place >= start) & (place < stop)
        return lax.select(here, new, x)

    operands = [operand, updates]
    return graph.inline(traced(updated, operands), operands, source)


COMBINE: dict[Any, Callable[[jax.Array, jax.Array], jax.Array]] = {
    p.scatter_p: lambda x, update: update,
    p.scatter_add_p: lax.add,
    p.scatter_max_p: lax.max,
    p.scatter_min_p: lax.min,
    p.scatter_mul_p: lax.mul,
    SCATTER_SUB: lax.sub,
}

WHEN_CUT: dict[Any, Any] = {
    p.gather_p: one_slice,
    **dict.fromkeys(COMBINE, one_update),
}
