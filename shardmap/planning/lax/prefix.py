"""Cuts running reductions such as ``cumsum`` along their axis, in three stages.

They compute the total of each piece, the total of all pieces before each, and the
running reduction of each piece, combined with the latter.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import (
    MANY,
    Cut,
    Reason,
    RuleMaker,
    Stages,
    Windowed,
)
from shardmap.planning.lax.batched import but_one
from shardmap.planning.lax.staged.pieces import (
    PIECES,
    Numbers,
    WithinPiece,
    of_each_piece,
)

CARRIED = Reason(
    "each element depends on all before it", "cut another axis, which is independent"
)


KINDS: Mapping[Any, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    p.cumlogsumexp_p: (jax.nn.logsumexp, jnp.logaddexp, "logaddexp"),
    p.cummax_p: (jnp.max, jnp.maximum, "max"),
    p.cummin_p: (jnp.min, jnp.minimum, "min"),
    p.cumprod_p: (jnp.prod, jnp.multiply, "mul"),
    p.cumsum_p: (jnp.sum, jnp.add, "add"),
}
"""How a piece is reduced, how two results combine, and the name of their combiner."""


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand]:
    """Writes a running reduction as the three stages."""
    axis, reverse = node.params["axis"], node.params["reverse"]
    [operand], [reduce, join, combiner] = node.ins, KINDS[node.primitive]
    edges = (0, *cuts[0][axis].at, operand.shape[axis])
    axes = list(range(len(operand.shape)))

    def running(x: jax.Array) -> jax.Array:
        return node.primitive.bind(_wide(x), axis=axis, reverse=reverse)

    def total(piece: jax.Array, start: Any) -> list[jax.Array]:
        piece = _wide(piece)
        reduced = reduce(piece, axis=axis, keepdims=True)
        return [reduced.astype(piece.dtype)]

    def before(totals: jax.Array) -> jax.Array:
        neutral = jnp.asarray(identity(combiner, totals.dtype), totals.dtype)
        moved = (-1, 1, 0) if reverse else (1, -1, 0)
        around = [moved if k == axis else (0, 0, 0) for k in axes]
        return lax.pad(running(totals), neutral, around)

    def of_box(local: Local) -> list[jax.Array]:
        """A box, from where its first piece starts, or in reverse to its last end."""
        value, around = local.values
        begin, *lengths = local.holes[0, axis]
        piece = len(lengths) - 1 if reverse else 0
        around = lax.slice_in_dim(around, piece, piece + 1, axis=axis)
        joined = join(around, running(value)).astype(value.dtype)
        size = local.sizes[axis]
        return [lax.slice_in_dim(joined, begin, begin + size, axis=axis)]

    totals = of_each_piece(
        *(graph, total, operand, axes, [axes]), factor=axis, edges=edges
    )
    [rest] = graph.call(before, totals)
    seen = WithinPiece(edges[-1], edges=edges, start=not reverse, stop=reverse)
    numbers = Numbers(len(edges) - 1, edges=edges)
    rule = functools.partial(
        Factors,
        ins=[
            [Windowed(k, window) if k == axis else k for k in axes]
            for window in (seen, numbers)
        ],
        outs=[axes],
        emitter=of_box,
        cheap=False,
        complete=frozenset({1}),
        each=MANY,
    )
    return graph.add(PIECES, {"rule": rule}, [operand, rest], [operand.aval])


STAGES: dict[Any, Stages] = dict.fromkeys(KINDS, in_stages)


def _wide(x: jax.Array) -> jax.Array:
    """Small floats as float32, to be rounded once, as in sums."""
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if small else x


RULES: dict[Any, RuleMaker] = dict.fromkeys(
    KINDS, lambda node: but_one(node, node.params["axis"], CARRIED)
)
