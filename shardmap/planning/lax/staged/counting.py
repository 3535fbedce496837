"""Selects the elements at given ranks of an axis without a sort, by counting.

The element of rank ``k`` has ``k`` elements below it. It is found digit by digit: for
each value of the next digit, a stage counts the elements below. A stage reads the data
once and keeps the counts only. Where the axis is not cut, a shard finds one bit after
the other, in a tenth of the time of a sort by XLA for CPU. NaN comes last, as in a
sort, and -0.0 before 0.0.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap.planning.engine.factors import Factors, Local, out_size
from shardmap.planning.engine.nodes import Graph, Node, Operand, PlanPrimitive
from shardmap.planning.engine.rules import MANY, Reason, RuleMaker

COUNTED, DIGITS = PlanPrimitive("elements counted"), PlanPrimitive("next digit")
SELECTED = PlanPrimitive("elements selected")

DIGIT = 4
"""The bits of a digit: more bits mean fewer stages and more counts."""

WIDE = 128
"""The fewest columns with which rows are counted block by block on CPU."""

ROWS = 8
"""The rows of a block."""

COUNTABLE = frozenset(
    np.dtype(name)
    for name in """
    int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16
    """.split()
)
"""The types whose bits can be mapped to unsigned integers of the same order."""


def counted_out(
    graph: Graph,
    operand: Operand,
    ranks: Operand,
    shape: tuple[int, ...],
    axes: Sequence[int | None],
    is_cut: bool,
) -> Operand:
    """Adds the elements that have the given ranks along an axis.

    Args:
      graph: the graph.
      operand: the value, in any order.
      ranks: the rank of each element of the result. An axis along which ranks do not
        change may have size 1.
      shape: of the result.
      axes: the result's axis for each axis of the operand, None for the ranked one.
      is_cut: whether that axis is cut.
    """
    dtype = np.dtype(operand.aval.dtype)
    params = {"at": tuple(axes), "selects": True}
    if not is_cut:
        made = jax.core.ShapedArray(shape, dtype)
        return graph.add(SELECTED, params, [operand, ranks], [made])[0]
    key = jax.core.ShapedArray(shape, _bits(dtype))
    count = jax.core.ShapedArray((2**DIGIT - 1, *shape), np.dtype("int32"))
    [low] = graph.call(lambda: jnp.zeros(shape, key.dtype), [])
    for shift in reversed(range(0, 8 * dtype.itemsize, DIGIT)):
        # An array, not a parameter: all digits share their functions.
        place = graph.constant(np.full(1, shift, key.dtype))
        [below] = graph.add(COUNTED, params, [operand, low, place], [count])
        digits = {"selects": True}
        [low] = graph.add(DIGITS, digits, [low, below, ranks, place], [key])
    [found] = graph.call(lambda low: from_ordered(low, dtype), [low])
    return found


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def ordered(x: jax.Array) -> jax.Array:
    """Unsigned integers that are ordered as a sort orders the elements."""
    dtype = np.dtype(x.dtype)
    bits = _bits(dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x
    found = lax.bitcast_convert_type(x, bits)
    top = np.array(1 << (8 * dtype.itemsize - 1), bits)
    if jnp.issubdtype(dtype, jnp.integer):
        return found ^ top
    # All bits of negative numbers are inverted, of others the sign only. A shift that
    # repeats the sign holds fewer values at once than a choice between both.
    signed = lax.bitcast_convert_type(x, np.dtype(f"int{8 * dtype.itemsize}"))
    signs = signed >> (8 * dtype.itemsize - 1)
    found ^= lax.bitcast_convert_type(signs, bits) | top
    return jnp.where(jnp.isnan(x), np.array(np.iinfo(bits).max, bits), found)


def from_ordered(found: jax.Array, dtype: np.dtype) -> jax.Array:
    """The inverse of `ordered`."""
    top = np.array(1 << (8 * dtype.itemsize - 1), found.dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return found
    if jnp.issubdtype(dtype, jnp.integer):
        return lax.bitcast_convert_type(found ^ top, dtype)
    found = jnp.where(found & top != 0, found ^ top, ~found)
    return lax.bitcast_convert_type(found, dtype)


def how_many_below(node: Node) -> Factors:
    """``i j, k j -> b k j; i add``: the number of elements below each digit."""
    axes: tuple[int | None, ...] = node.params["at"]
    rank, counted = len(node.in_shapes[1]), axes.index(None)
    operand = ["counted" if axis is None else axis for axis in axes]
    # The ranks of one row first, then the axes of the operand in its order.
    free = [k for k in range(rank) if k not in axes]
    order = [*free, *(axis for axis in axes if axis is not None)]

    count = functools.partial(_below, axis=counted, order=tuple(order))

    return Factors(
        node,
        [operand, range(rank), [None]],
        [["bound", *range(rank)]],
        contracted={"counted": "add"},
        wholes={"bound": ONE_DIGIT},
        emitter=lambda local: [count(*local.values)],
        cheap=False,
    )


# Each digit of each rank is counted in the same way: it is traced once.
@functools.partial(jax.jit, static_argnames=("axis", "order"), inline=True)
def _below(
    operand: jax.Array,
    low: jax.Array,
    shift: jax.Array,
    axis: int,
    order: Sequence[int],
) -> jax.Array:
    """Counts elements along an axis; ``order`` is as of `how_many_below`."""
    keys = jnp.moveaxis(ordered(operand), axis, 0)
    low = lax.transpose(low, order)
    steps = jnp.arange(1, 2**DIGIT, dtype=low.dtype) << shift[0]
    bounds = low[None] + lax.expand_dims(steps, range(1, low.ndim + 1))
    shape = bounds.shape
    bounds = lax.collapse(bounds, 0, bounds.ndim - keys.ndim + 1)
    # A CPU compares signed integers in fewer instructions.
    signed = np.dtype(f"int{8 * keys.dtype.itemsize}")

    def add_rows(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        rows = from_ordered(rows, signed)
        below = rows[:, None] < from_ordered(bounds, signed)[None]
        return total + jnp.sum(below, 0, dtype=jnp.int32), None

    def below(bound: jax.Array) -> jax.Array:
        return jnp.sum(keys < bound[None], 0, dtype=jnp.int32)

    if bounds[0].size >= WIDE and jax.default_backend() == "cpu":
        # Rows and bounds stay in the cache; XLA sums along an axis that is not the last
        # one far more slowly.
        blocks, rest = jnp.split(keys, [len(keys) // ROWS * ROWS])
        blocks = blocks.reshape(-1, ROWS, *keys.shape[1:])
        found, _ = lax.scan(add_rows, jnp.zeros(bounds.shape, jnp.int32), blocks)
        found, _ = add_rows(found, rest)
    else:
        # One bound after the other: the comparisons are not kept.
        found = lax.map(below, bounds)
    back = [0, *(1 + order.index(k) for k in range(len(order)))]
    return lax.transpose(found.reshape(shape), back)


def next_digit(node: Node) -> Factors:
    """``k j, b k j, k j -> k j``: appends the digit of the element of each rank."""
    shape, _, ranks, _ = node.in_shapes
    axes = range(len(shape))
    wanted = [k if ranks[k] == shape[k] else None for k in axes]

    def emitter(local: Local) -> Sequence[Any]:
        low, below, ranks, shift = local.values
        digit = jnp.sum(below <= ranks[None], 0, dtype=low.dtype)
        return [low + (digit << shift[0])]

    return Factors(
        node,
        [axes, ["bound", *axes], wanted, [None]],
        [axes],
        wholes={"bound": ONE_DIGIT},
        emitter=emitter,
        # The digits before are kept, and not found again.
        complete=frozenset({0}),
    )


def selected(node: Node) -> Factors:
    """``* j, k j -> k j``: the element of each rank, bit by bit."""
    axes: tuple[int | None, ...] = node.params["at"]
    [shape], ranks = node.out_shapes, node.in_shapes[1]
    every = range(len(shape))
    counted = axes.index(None)
    free = [k for k in every if k not in axes]
    order = [*free, *(axis for axis in axes if axis is not None)]

    def emitter(local: Local) -> Sequence[Any]:
        keys = jnp.moveaxis(ordered(local.values[0]), counted, 0)
        places = jnp.broadcast_to(local.values[1], out_size(local, every))
        width = keys.dtype.itemsize * 8

        def find(place: jax.Array) -> jax.Array:
            def bit(k: jax.Array, low: jax.Array) -> jax.Array:
                shift = lax.convert_element_type(width - 1 - k, low.dtype)
                bound = low | jnp.ones_like(low) << shift
                below = jnp.sum(keys < bound[None], 0, dtype=jnp.int32)
                return jnp.where(below <= place, bound, low)

            return lax.fori_loop(0, width, bit, jnp.zeros(keys.shape[1:], keys.dtype))

        places = lax.transpose(places, order)
        several = math.prod(places.shape[: len(free)]), *keys.shape[1:]
        found = lax.map(find, places.reshape(several)).reshape(places.shape)
        found = lax.transpose(found, [order.index(k) for k in every])
        return [from_ordered(found, np.dtype(local.values[0].dtype))]

    return Factors(
        node,
        [
            ["counted" if axis is None else axis for axis in axes],
            [k if ranks[k] == shape[k] else None for k in every],
        ],
        [every],
        wholes={"counted": COUNTED_WHOLE},
        emitter=emitter,
        cheap=False,
        each=MANY,
    )


ONE_DIGIT = Reason("these are the values of one digit")
COUNTED_WHOLE = Reason("its elements are counted", "cut another axis")

RULES: dict[Any, RuleMaker] = {
    COUNTED: how_many_below,
    DIGITS: next_digit,
    SELECTED: selected,
}
