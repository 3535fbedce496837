"""Places of extrema, from the extrema of pieces and their places."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.lax.staged.statistics import (
    SMALLER,
    OnePass,
    Pieces,
    Statistic,
    Statistics,
    in_names,
    piece_edges,
    unmoved,
)


def place(analysis: Analysis, node: Node) -> OnePass | None:
    """An argmax or argmin."""
    [operand], [axis] = node.ins, node.params["axes"]
    if not isinstance(operand, Value) or operand.aval.dtype.kind == "b":
        return None
    every = range(len(operand.shape))
    value, names = unmoved(operand, tuple(every))
    smaller = 1 if must_be_one_pass(node) else SMALLER * 3
    edges = piece_edges(analysis, value, [names.index(axis)], smaller)
    if edges is None:
        return None
    is_largest = node.primitive is p.argmax_p
    kind = _extremum(is_largest, np.dtype(node.params["index_dtype"]))
    pieces = Pieces(value, kind, edges)

    def combined(*arrays: jax.Array) -> jax.Array:
        best, places = (in_names(x, names, every) for x in arrays)
        arg = lax.argmax if is_largest else lax.argmin
        first = lax.expand_dims(arg(best, axis, np.int32), (axis,))
        return lax.squeeze(jnp.take_along_axis(places, first, axis), (axis,))

    def write(graph: Graph, statistics: Statistics) -> Sequence[Operand]:
        return graph.call(combined, statistics(pieces))

    return OnePass([pieces], write)


def must_be_one_pass(node: Node) -> bool:
    """Returns True for an argmax of computed floats.

    A second pass may compute other last bits, and find nothing equal to the maximum.
    """
    is_extremum = node.primitive in (p.argmax_p, p.argmin_p)
    is_computed = node.ins[0].producer is not None
    is_float = jnp.issubdtype(node.ins[0].aval.dtype, jnp.inexact)
    return is_extremum and is_computed and is_float


@functools.cache
def _extremum(is_largest: bool, dtype: Any) -> Statistic:
    """The extremum and its place, of that index type."""
    arg = lax.argmax if is_largest else lax.argmin

    def of_piece(x: jax.Array, axes: Sequence[int], start: Any) -> list[jax.Array]:
        place = lax.expand_dims(arg(x, axes[0], dtype), axes)
        best = jnp.take_along_axis(x, place, axes[0])
        return [best, place + start.astype(dtype)]

    return Statistic(2, of_piece, p.reduce_max_p if is_largest else p.reduce_min_p)
