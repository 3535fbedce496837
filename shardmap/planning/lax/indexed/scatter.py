"""The rules of updates: each shard applies those inside of its box.

``x.at[1:-1].add(y)`` is a scatter whose only index is a literal, and is written as a
``dynamic_update_slice``.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import COMBINE, identity
from shardmap.planning.engine.factors import Factors, Local, bind
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite
from shardmap.planning.engine.rules import (
    MANY,
    Axis,
    Factor,
    Reason,
    Rule,
    RuleMaker,
    Windowed,
)
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.indexed.gather import as_int32, moved
from shardmap.planning.lax.indexed.known import evaluated, known_columns
from shardmap.planning.lax.indexed.ranges import lines, scatter_window
from shardmap.planning.lax.primitives import SCATTER_SUB

WRITTEN = Reason(
    "where the updates go is known only when it runs",
    "cut only the operand, or another axis",
)

ALL_OVER = Reason(
    "the updates of each piece go to places all over it",
    "cut only the operand, or put them in order",
)

WINDOWS = Reason(
    "windows of it are written, at several or unknown places or partly outside",
    "cut another axis",
)


def _united(node: Node) -> tuple[dict[int, Axis], set[int]]:
    """Axis of the indices -> its factor, where it is one loop with the operand's.

    Also the axes along which updates are known to go all over the operand.
    """
    numbers = node.params["dimension_numbers"]
    columns = numbers.scatter_dims_to_operand_dims
    batching = numbers.scatter_indices_batching_dims, numbers.operand_batching_dims
    united: dict[int, Axis] = dict(zip(*batching, strict=True))
    # Where places are known, a piece of the operand sees the updates of its own.
    all_over = set()
    for line in lines(node, columns) or ():
        if line.axis not in numbers.inserted_window_dims or line.along in united:
            continue
        is_sorted = node.params["indices_are_sorted"]
        if node.primitive in COMBINERS and not is_sorted:
            _, together = np.unique(line.places, return_counts=True)
            if int(np.max(together)) > MOST_TOGETHER:
                continue
        window = scatter_window(line, node.in_shapes[0][line.axis])
        if window is not None:
            united[line.along] = Windowed(line.axis, window)
        else:
            all_over.add(line.along)
    return united, all_over


def of_one_place(graph: Graph, node: Node) -> list[Operand] | None:
    """Writes an update of one window at a known place as one of a slice."""
    [shape, places, updates], params = node.in_shapes, node.params
    numbers, combiner = params["dimension_numbers"], COMBINERS.get(node.primitive)
    columns = numbers.scatter_dims_to_operand_dims
    batches, inserted = numbers.operand_batching_dims, numbers.inserted_window_dims
    if len(places) - 1 != len(batches):
        return None
    known = {
        axis: int(column.flat[0])
        for axis, column in zip(columns, known_columns(node.ins[1]), strict=True)
        if column is not None and column.size and (column == column.flat[0]).all()
    }
    if len(known) < len(columns) or (combiner and node.outs[0].aval.dtype == bool):
        return None
    # The axis of the updates for each of the operand's.
    windows = numbers.update_window_dims
    along = [axis for axis in range(len(updates)) if axis not in windows]
    indexed = [along[k] for k in numbers.scatter_indices_batching_dims]
    axes = dict(zip(batches, indexed, strict=True))
    left = [axis for axis in range(len(shape)) if axis not in (*inserted, *batches)]
    axes |= zip(left, windows, strict=True)
    starts = []
    for axis, size in enumerate(shape):
        room = size - (updates[axes[axis]] if axis in axes else 1)
        start = known.get(axis, 0)
        if params["mode"] == lax.GatherScatterMode.CLIP:
            start = min(max(start, 0), room)
        if not 0 <= start <= room:
            return None
        starts.append(start)

    def updated(x: jax.Array, y: jax.Array) -> jax.Array:
        order = [axes[axis] for axis in sorted(axes)]
        y = lax.expand_dims(lax.transpose(y, order), inserted)
        if combiner:
            ends = [a + n for a, n in zip(starts, y.shape, strict=True)]
            y = -y if node.primitive is SCATTER_SUB else y
            y = COMBINE[combiner](lax.slice(x, starts, ends), y)
        return lax.dynamic_update_slice(x, y, starts)

    return graph.call(updated, [node.ins[0], node.ins[2]])


class Scatter(Factors):
    """The operand's axes pass: each shard drops the updates that go elsewhere.

    Updates that combine give partial results; one of them includes the operand.

    Attributes:
      in_updates: the operand's axes that have an axis in the updates.
      shifted: those that have an index, but no axis there.
    """

    # Updates are taken once; they are not combined with each place of the operand.
    operations = Rule.operations

    def __init__(self, node: Node) -> None:
        numbers = node.params["dimension_numbers"]
        shape, indices_shape, updates_shape = node.in_shapes
        united, all_over = _united(node)
        indices = [united.get(k, f"i{k}") for k in range(len(indices_shape))]
        self.combiner = COMBINERS.get(node.primitive)
        contracted: dict[Factor, str] = {}
        # The last axis of the indices has the coordinates of one place.
        wholes: dict[Factor, Reason] = {indices[-1]: WRITTEN}
        for k, factor in enumerate(indices[:-1]):
            if self.combiner and k not in united:
                contracted[factor] = self.combiner
            elif k not in united:
                wholes[factor] = ALL_OVER if k in all_over else WRITTEN
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        self.in_updates = [axis for axis in range(len(shape)) if axis not in gone]
        batch, window = iter(indices[:-1]), iter(self.in_updates)
        updates: list[Axis] = []
        for place, size in enumerate(updates_shape):
            if place not in numbers.update_window_dims:
                updates.append(next(batch))
            elif size == shape[axis := next(window)]:
                updates.append(axis)
            else:
                updates.append(f"u{axis}")
                wholes |= {f"u{axis}": WINDOWS, axis: WINDOWS}
        columns = numbers.scatter_dims_to_operand_dims
        self.shifted = [k for k in numbers.inserted_window_dims if k in columns]
        super().__init__(
            node,
            [range(len(shape)), indices, updates],
            [range(len(shape))],
            contracted=contracted,
            wholes=wholes,
            # Their indices become relative to the start of the shard's box.
            starts=[*self.shifted, *contracted],
            emitter=self._emitted,
            # One update is copied; many are looked at one after the other.
            cheap=math.prod(indices_shape[:-1]) == 1,
            each=MANY // 16,
        )

    def _emitted(self, local: Local) -> Sequence[Any]:
        """The equation for one shard."""
        node, shape = self.node, self.node.in_shapes[0]
        values, params = list(local.values), dict(node.params)
        parts = [k for k in self.contracted if local.sizes[k] != self.sizes[k]]
        if self.combiner and parts:
            # One shard updates the operand, the others the identity of the combiner.
            first = functools.reduce(
                jnp.logical_and, [local.starts[k] == 0 for k in parts]
            )
            nothing = identity(self.combiner, values[0].dtype)
            values[0] = jnp.where(first, values[0], nothing)
        if not np.size(values[2]):  # A literal may be a Python scalar.
            return values[:1]
        numbers, last = node.params["dimension_numbers"], None
        axes = numbers.scatter_dims_to_operand_dims
        if any(local.sizes[axis] != shape[axis] for axis in self.shifted):
            starts = {axis: local.starts[axis] for axis in self.shifted}
            if params["mode"] == lax.GatherScatterMode.CLIP:
                last = [size - 1 for size in shape]
                places = numbers.update_window_dims
                for axis, place in zip(self.in_updates, places, strict=True):
                    last[axis] = shape[axis] - node.in_shapes[2][place]
            values[1] = moved(values[1], axes, starts, last)
            # Updates of other boxes are dropped: their indices are negative or too
            # large.
            params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
            params["indices_are_sorted"] = False
        return bind(node, values, params)


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


MOST_TOGETHER = 16
"""The most updates of one place that cuts follow: all of them are in one piece."""


COMBINERS = {
    p.scatter_add_p: "add",
    p.scatter_max_p: "max",
    p.scatter_min_p: "min",
    p.scatter_mul_p: "mul",
    SCATTER_SUB: "add",
}

SCATTERS = (p.scatter_p, *COMBINERS)
RULES: dict[Any, RuleMaker] = {
    **dict.fromkeys(SCATTERS, Scatter),
    p.dynamic_update_slice_p: dynamic_update_slice,
}
REWRITES: dict[Any, Rewrite] = dict.fromkeys(SCATTERS, of_one_place)
