"""Slices and updates of slices that start at a place that may be unknown."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p
from jax.typing import ArrayLike

from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite, Scalar
from shardmap.planning.engine.rules import Axis, Reason, RuleMaker, Windowed
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.indexed.known import evaluated

WRITTEN = Reason(
    "where the updates go is known only when it runs",
    "cut only the operand, or another axis",
)


def as_int32(index: ArrayLike) -> jax.Array:
    """Indices of any integer type; those far outside of an axis stay outside.

    The start of a shard's box is subtracted from them, which would wrap around in small
    or unsigned types.
    """
    index = jnp.asarray(index)
    limits = np.iinfo(np.int32)
    if index.dtype in (jnp.uint32, jnp.uint64):
        # `jnp.clip` would turn the least int32 into a large unsigned number.
        index = jnp.minimum(index, limits.max)
    elif index.dtype.itemsize > 4:
        index = jnp.clip(index, limits.min, limits.max)
    return index.astype(jnp.int32)


def moved(
    index: jax.Array,
    axes: Sequence[int],
    starts: Mapping[int, ArrayLike],
    last: Sequence[int] | None,
) -> jax.Array:
    """Places relative to the start of a box; those before it are negative.

    They are clipped to the last place on each axis first, if that is given.
    """
    index = as_int32(index)
    columns = []
    for k, axis in enumerate(axes):
        column = index[..., k]
        if last is not None:
            column = jnp.clip(column, 0, last[axis])
        start = starts.get(axis)
        columns.append(column if start is None else column - as_int32(start))
    return jnp.stack(columns, -1)


def dynamic_slice(graph: Graph, node: Node) -> list[Operand]:
    """Writes a slice as one with literal starts, and as a gather of one place."""
    sizes, every = node.out_shapes[0], node.ins[1:]
    unknown = [
        k
        for k, start in enumerate(every)
        if sizes[k] != node.in_shapes[0][k] and not isinstance(start, Scalar)
    ]
    numbers = lax.GatherDimensionNumbers(tuple(range(len(sizes))), (), tuple(unknown))

    def taken(x: jax.Array, *starts: jax.Array) -> jax.Array:
        for k, start in enumerate(every):
            if isinstance(start, Scalar):
                # As JAX does it: the start moves, so that all elements exist.
                first = min(max(int(start.value), 0), x.shape[k] - sizes[k])
                x = lax.slice_in_dim(x, first, first + sizes[k], axis=k)
        if not unknown:
            return x
        places = jnp.stack([starts[k] for k in unknown])
        return lax.gather(x, places, numbers, sizes, mode="clip")

    return graph.call(taken, node.ins)


def dynamic_update_slice(node: Node) -> Factors:
    """The operand's axes pass: each shard chooses between its box and the update.

    Where the start is known, it reads only what of the update lies in its box.
    """
    shape, update = node.in_shapes[:2]
    axes = range(len(shape))
    written: list[Axis] = list(axes)
    shifted = []
    for k in axes:
        if update[k] != shape[k]:
            if (start := evaluated(node.ins[2 + k])) is None:
                written[k] = f"u{k}"
                shifted.append(k)
            else:
                # As JAX does it: the start moves, so that all elements exist.
                first = min(max(int(start), 0), shape[k] - update[k])
                written[k] = Windowed(k, Window(update[k], pad=first))
    rest: list[Any] = [[] for _ in axes]

    def emitter(local: Local) -> Sequence[Any]:
        operand, part, *starts = local.values
        if not part.size:
            return [operand]
        begins: list[Any] = [local.holes.get((1, k), (0,))[0] for k in axes]
        rooms, wide = [0] * len(shape), operand
        for k in shifted:
            begins[k] = jnp.clip(as_int32(starts[k]), 0, shape[k] - update[k])
            if operand.shape[k] != shape[k]:
                # What lies beside the box is written beside it.
                rooms[k] = update[k]
                begins[k] = jnp.maximum(begins[k] - local.starts[k] + rooms[k], 0)
                beside = (*wide.shape[:k], rooms[k], *wide.shape[k + 1 :])
                room = lax.broadcast(part.reshape(-1)[0], beside)
                wide = lax.concatenate([room, wide, room], k)
        wide = lax.dynamic_update_slice(wide, part, list(map(jnp.int32, begins)))
        ends = [room + n for room, n in zip(rooms, operand.shape, strict=True)]
        return [lax.slice(wide, rooms, ends)]

    return Factors(
        node,
        [axes, written, *rest],
        [axes],
        wholes={f"u{k}": WRITTEN for k in shifted},
        starts=shifted,
        emitter=emitter,
    )


REWRITES: dict[Any, Rewrite] = {p.dynamic_slice_p: dynamic_slice}
RULES: dict[Any, RuleMaker] = {p.dynamic_update_slice_p: dynamic_update_slice}
