"""Cuts running reductions such as ``cumsum`` along their axis, in three stages.

They compute the total of each piece, the total of all pieces before each, and the
running reduction of each piece, combined with the latter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Local
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import Cut, Reason, RuleMaker, Stages
from shardmap.planning.lax.batched import but_one
from shardmap.planning.lax.reduce import wide
from shardmap.planning.lax.staged.pieces import of_each_piece, within_pieces

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
        # Small floats are rounded once, as in sums.
        x = x.astype(wide(x.dtype))
        return node.primitive.bind(x, axis=axis, reverse=reverse)

    def total(piece: jax.Array, start: Any) -> list[jax.Array]:
        piece = piece.astype(wide(piece.dtype))
        reduced = reduce(piece, axis=axis, keepdims=True)
        return [reduced.astype(piece.dtype)]

    def before(totals: jax.Array) -> jax.Array:
        neutral = jnp.asarray(identity(combiner, totals.dtype), totals.dtype)
        moved = (-1, 1, 0) if reverse else (1, -1, 0)
        around = [moved if k == axis else (0, 0, 0) for k in axes]
        return lax.pad(running(totals), neutral, around)

    def of_box(local: Local) -> list[jax.Array]:
        """A box of the pieces that it lies in."""
        value, around = local.values
        begin, *lengths = local.holes[0, axis]
        piece = len(lengths) - 1 if reverse else 0
        around = lax.slice_in_dim(around, piece, piece + 1, axis=axis)
        joined = join(around, running(value)).astype(value.dtype)
        size = local.sizes[axis]
        return [lax.slice_in_dim(joined, begin, begin + size, axis=axis)]

    others = [k for k in axes if k != axis]
    totals = of_each_piece(graph, total, operand, axis, edges, others)
    [rest] = graph.call(before, totals)
    return [within_pieces(graph, of_box, (operand, rest), axis, edges, others)]


STAGES: dict[Any, Stages] = dict.fromkeys(KINDS, in_stages)


RULES: dict[Any, RuleMaker] = dict.fromkeys(
    KINDS, lambda node: but_one(node, node.params["axis"], CARRIED)
)
