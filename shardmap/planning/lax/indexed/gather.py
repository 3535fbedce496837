"""The rule of ``gather``: which axes of the operand and of the indices can be cut.

An axis that is taken in full passes. An axis that is taken in windows is whole. An axis
that is taken in single places gives partial results: each shard takes the elements in
its box, and zero for the others. For ``table[words]`` the rule is
``a b, c * -> c b; a add``. If indices are known and local, each piece of the result
reads a range of the axis instead.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Factors, Local, bind
from shardmap.planning.engine.keys import is_key
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import (
    Axis,
    Cut,
    Factor,
    Reason,
    RuleMaker,
    Stages,
    Windowed,
)
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.indexed.known import one_place
from shardmap.planning.lax.indexed.places import INDEXED, as_int32, combiner_of, moved
from shardmap.planning.lax.indexed.ranges import gather_window, lines

TOGETHER = Reason(
    "a place is looked up with those around it on this axis",
    "cut another axis of the indices",
)

WINDOWS = Reason(
    "windows of it are taken, all over it or partly outside",
    "cut the indices, or an axis that is not indexed",
)

FILL = lax.GatherScatterMode.FILL_OR_DROP


class _Named(NamedTuple):
    """The factors of a gather, and how each axis of the operand is taken.

    Attributes:
      operand, indices, out: the factor of each axis.
      wholes: the factors that are never cut, and why.
      full: the operand's axes that are taken in full.
      single: those that are taken in single places.
      stretches: those whose places are known and local, and their windows.
    """

    operand: list[Axis]
    indices: list[Axis]
    out: list[Factor]
    wholes: dict[Factor, Reason]
    full: list[int]
    single: list[int]
    stretches: Mapping[int, Window]


def _named(node: Node) -> _Named:
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    shape, indices_shape = node.in_shapes
    operand: list[Axis] = [f"o{axis}" for axis in range(len(shape))]
    # The last axis of the indices has the coordinates of one place.
    indices: list[Axis] = [f"i{k}" for k in range(len(indices_shape))]
    out: list[Factor] = [None] * len(node.out_shapes[0])
    wholes: dict[Factor, Reason] = {indices[-1]: INDEXED}
    for axis, factor in zip(batch_axes(node), indices[:-1], strict=True):
        out[axis] = factor
    for axis, index_axis in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        operand[axis] = indices[index_axis]
    single = list(numbers.collapsed_slice_dims)
    full = []
    known = lines(node, numbers.start_index_map, sizes)
    for axis, place in zip(window_axes(node), numbers.offset_dims, strict=True):
        if sizes[axis] == shape[axis]:
            out[place] = operand[axis]
            full.append(axis)
        elif sizes[axis] == 1:
            single.append(axis)
        else:
            out[place] = f"w{axis}"
            wholes |= dict.fromkeys(
                [operand[axis], out[place]], INDEXED if known is None else WINDOWS
            )
    # Where there is no coordinate, the first place is taken.
    lost = [axis for axis in single if axis not in numbers.start_index_map]
    wholes |= {operand[axis]: INDEXED for axis in lost}
    single = [axis for axis in single if axis not in lost]
    stretches: dict[int, Window] = {}
    for line in known or ():
        axis = line.axis
        if axis in stretches or sizes[axis] == shape[axis]:
            continue
        if (places := gather_window(line, shape[axis], sizes[axis])) is not None:
            if axis in single:
                single.remove(axis)
            operand[axis] = Windowed(indices[line.along], places)
            stretches[axis] = places
            # The start of the box is the least of all of them.
            wholes |= {indices[other]: TOGETHER for other in line.varies}
    return _Named(operand, indices, out, wholes, full, single, stretches)


def gather(node: Node) -> Factors:
    """See the module."""
    named = _named(node)
    combiner = combiner_of(node)
    contracted: dict[Factor, str] = {}
    wholes = dict(named.wholes)
    for axis in named.single:
        if combiner is None:
            wholes[named.operand[axis]] = INDEXED
        else:
            contracted[named.operand[axis]] = combiner

    def passes(combiner: str, pending: frozenset[int]) -> str | None:
        # The fill value would be added once per part.
        return combiner if pending == {0} and node.params["mode"] != FILL else None

    return Factors(
        node,
        [named.operand, named.indices],
        [named.out],
        contracted=contracted,
        wholes=wholes,
        starts=list(contracted),
        emitter=functools.partial(_emitted, node, named),
        passes=passes,
    )


def _emitted(node: Node, named: _Named, local: Local) -> Sequence[Any]:
    """The equation for one shard."""
    [shape, _], operand, params = node.in_shapes, named.operand, dict(node.params)
    coordinates = params["dimension_numbers"].start_index_map
    taken = list(params["slice_sizes"])
    last = [size - count for size, count in zip(shape, taken, strict=True)]
    for axis in named.full:
        taken[axis] = local.sizes[operand[axis]]
    params["slice_sizes"] = tuple(taken)
    value, index = local.values
    starts = {
        axis: local.starts[operand[axis]]
        for axis in named.single
        if local.sizes[operand[axis]] != shape[axis]
    }
    is_part = any(axis in starts for axis in named.single)
    for axis, window in named.stretches.items():
        if value.shape[axis] != window.size and index.size:
            # The shard's box starts at the least of them.
            starts[axis] = jnp.min(as_int32(index)[..., coordinates.index(axis)])
    if not starts:
        return bind(node, [value, index], params)
    fills = params["mode"] == FILL
    places = moved(index, coordinates, starts, None if fills else last)
    if not is_part:
        return bind(node, [value, places], params)
    # Elements of other shards add nothing. Clipped places may not be sorted any more.
    params |= {"mode": FILL, "fill_value": identity("add", value.dtype)[()]}
    params |= {"indices_are_sorted": False, "unique_indices": False}
    [result] = bind(node, [value, places], params)
    if not fills:
        return [result]
    outside, index = jnp.zeros(index.shape[:-1], bool), as_int32(index)
    for k, axis in enumerate(coordinates):
        outside |= (index[..., k] < 0) | (index[..., k] > last[axis])
    # One shard fills in: the sum would have one fill value per shard.
    for axis in named.single:
        outside &= starts.get(axis, 0) == 0
    outside = lax.broadcast_in_dim(outside, result.shape, batch_axes(node))
    return [jnp.where(outside, jnp.full_like(result, fill_value(node)), result)]


def batch_axes(node: Node) -> list[int]:
    """The axes of the result that are those of the indices."""
    offsets = node.params["dimension_numbers"].offset_dims
    return [axis for axis in range(len(node.out_shapes[0])) if axis not in offsets]


def window_axes(node: Node) -> list[int]:
    """The axes of the operand that have an axis in the result."""
    numbers = node.params["dimension_numbers"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    return [axis for axis in range(len(node.in_shapes[0])) if axis not in gone]


def fill_value(node: Node) -> jax.Array:
    """The result of a gather at places outside of its operand."""
    one = jnp.zeros(1, node.outs[0].aval.dtype)
    return one.at[1].get(mode="fill", fill_value=node.params["fill_value"])


def one_slice(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """Writes a ``gather`` of one window at a known place as a slice."""
    numbers, taken = node.params["dimension_numbers"], node.params["slice_sizes"]
    operand, indices = node.ins
    places = one_place(node, numbers.start_index_map)
    is_known = len(places) == len(numbers.start_index_map)
    if len(indices.shape) != 1 or not is_known or is_key(operand.aval):
        return None
    starts = [places.get(axis, 0) for axis in range(len(operand.shape))]
    limits = [a + n for a, n in zip(starts, taken, strict=True)]
    if min(starts) < 0 or any(map(operator.gt, limits, operand.shape)):
        return None
    gone = tuple(int(axis) for axis in numbers.collapsed_slice_dims)

    def sliced(x: jax.Array) -> jax.Array:
        return lax.squeeze(lax.slice(x, starts, limits), gone)

    return graph.call(sliced, [operand])


RULES: dict[Any, RuleMaker] = {p.gather_p: gather}
STAGES: dict[Any, Stages] = {p.gather_p: one_slice}
