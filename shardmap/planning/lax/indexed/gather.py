"""The rule of ``gather``, and of slices at unknown places, which are written as one.

An axis that is taken in full passes. An axis that is taken in windows is whole. An axis
that is taken in single places gives partial results: each shard takes the elements in
its box, and zero for the others. For ``table[words]`` the rule is
``a b, c * -> c b; a add``. If indices are known and local, each piece of the result
reads a range of the axis instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p
from jax.typing import ArrayLike

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Factors, Local, bind
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite, Scalar, is_key
from shardmap.planning.engine.rules import (
    Axis,
    Factor,
    Reason,
    RuleMaker,
    Windowed,
    first_passes,
    nothing_passes,
)
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.indexed.ranges import gather_window, lines

INDEXED = Reason(
    "which elements are taken is known only when it runs",
    "cut the indices, or an axis that is not indexed",
)

TOGETHER = Reason(
    "a place is looked up with those around it on this axis",
    "cut another axis of the indices",
)

WINDOWS = Reason(
    "windows of it are taken, all over it or partly outside",
    "cut the indices, or an axis that is not indexed",
)

FILL = lax.GatherScatterMode.FILL_OR_DROP


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


class Gather(Factors):
    """See the module.

    Attributes:
      along: the axes of the result that are those of the indices.
      full: the operand's axes that are taken in full.
      single: those that are taken in single places.
      stretches: those whose places are known and local, and their windows.
    """

    def __init__(self, node: Node) -> None:
        numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
        shape, indices_shape = node.in_shapes
        operand: list[Axis] = [f"o{axis}" for axis in range(len(shape))]
        # The last axis of the indices has the coordinates of one place.
        indices: list[Axis] = [f"i{k}" for k in range(len(indices_shape))]
        out: list[Factor] = [None] * len(node.out_shapes[0])
        wholes: dict[Factor, Reason] = {indices[-1]: INDEXED}
        self.along = [k for k in range(len(out)) if k not in numbers.offset_dims]
        for axis, factor in zip(self.along, indices[:-1], strict=True):
            out[axis] = factor
        batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        for axis, index_axis in zip(*batching, strict=True):
            operand[axis] = indices[index_axis]
        single = list(numbers.collapsed_slice_dims)
        known = lines(node, numbers.start_index_map, sizes)
        self.full = []
        gone = {*single, *numbers.operand_batching_dims}
        windows = (axis for axis in range(len(shape)) if axis not in gone)
        for axis, place in zip(windows, numbers.offset_dims, strict=True):
            if sizes[axis] == shape[axis]:
                out[place] = operand[axis]
                self.full.append(axis)
            elif sizes[axis] == 1:
                single.append(axis)
            else:
                out[place] = f"w{axis}"
                why = INDEXED if known is None else WINDOWS
                wholes |= dict.fromkeys([operand[axis], out[place]], why)
        self.stretches: dict[int, Window] = {}
        for line in known or ():
            axis = line.axis
            if axis in self.stretches or sizes[axis] == shape[axis]:
                continue
            if (places := gather_window(line, shape[axis], sizes[axis])) is not None:
                operand[axis] = Windowed(indices[line.along], places)
                self.stretches[axis] = places
                # The start of the box is the least of all of them.
                wholes |= {indices[other]: TOGETHER for other in line.varies}
        self.single = [axis for axis in single if axis not in self.stretches]
        aval, contracted = node.outs[0].aval, dict[Factor, str]()
        # Keys cannot be added, and places beyond 2**31 do not fit into int32.
        are_added = not is_key(aval) and max(shape, default=0) < 2**31
        for axis in self.single:
            # Where there is no coordinate, the first place is taken.
            if are_added and axis in numbers.start_index_map:
                contracted[operand[axis]] = "or" if aval.dtype == bool else "add"
            else:
                wholes[operand[axis]] = INDEXED
        # The fill value would be added once per part.
        fills = node.params["mode"] == FILL
        super().__init__(
            node,
            [operand, indices],
            [out],
            contracted=contracted,
            wholes=wholes,
            starts=list(contracted),
            emitter=self._emitted,
            passes=nothing_passes if fills else first_passes,
        )

    def _emitted(self, local: Local) -> Sequence[Any]:
        """The equation for one shard."""
        node, [shape, _], params = self.node, self.node.in_shapes, self.node.params
        coordinates, operand = params["dimension_numbers"].start_index_map, self.ins[0]
        taken = list(params["slice_sizes"])
        last = [size - count for size, count in zip(shape, taken, strict=True)]
        for axis in self.full:
            taken[axis] = local.sizes[operand[axis]]
        params = {**params, "slice_sizes": tuple(taken)}
        value, index = local.values
        starts = {
            axis: local.starts[operand[axis]]
            for axis in self.single
            if local.sizes[operand[axis]] != shape[axis]
        }
        is_part = bool(starts)
        for axis, window in self.stretches.items():
            if value.shape[axis] != window.size and index.size:
                # The shard's box starts at the least of them.
                starts[axis] = jnp.min(as_int32(index)[..., coordinates.index(axis)])
        if not starts:
            return bind(node, [value, index], params)
        fills = params["mode"] == FILL
        places = moved(index, coordinates, starts, None if fills else last)
        if not is_part:
            return bind(node, [value, places], params)
        # Elements of other shards add nothing. Clipped places may not be sorted any
        # more.
        params |= {"mode": FILL, "fill_value": identity("add", value.dtype)[()]}
        params |= {"indices_are_sorted": False, "unique_indices": False}
        [result] = bind(node, [value, places], params)
        if not fills:
            return [result]
        index = as_int32(index)
        outside = jnp.zeros(index.shape[:-1], bool)
        for k, axis in enumerate(coordinates):
            outside |= (index[..., k] < 0) | (index[..., k] > last[axis])
        # One shard fills in: the sum would have one fill value per shard.
        for axis in self.single:
            outside &= starts.get(axis, 0) == 0
        outside = lax.broadcast_in_dim(outside, result.shape, self.along)
        fill = jnp.zeros(1, result.dtype)
        fill = fill.at[1].get(mode="fill", fill_value=node.params["fill_value"])
        return [jnp.where(outside, fill, result)]


RULES: dict[Any, RuleMaker] = {p.gather_p: Gather}
REWRITES: dict[Any, Rewrite] = {p.dynamic_slice_p: dynamic_slice}
