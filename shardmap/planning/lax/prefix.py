"""Cuts running reductions such as ``cumsum`` along their axis, in three stages.

They compute the total of each piece, the total of all pieces before each, and the
running reduction of each piece, combined with the latter.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Factors
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.pieces import WithinPiece, in_pieces
from shardmap.planning.engine.rules import MANY, Cut, Reason, RuleMaker, Stages
from shardmap.planning.lax.batched import but_one
from shardmap.planning.lax.staged.blocks import PIECES, of_each_piece

CARRIED = Reason(
    "each element depends on all before it", "cut another axis, which is independent"
)


class RunningKind(NamedTuple):
    """A running reduction: how a piece is reduced, and how two results combine."""

    reduce: Callable[..., Any]
    join: Callable[[Any, Any], Any]
    identity: str


KINDS: Mapping[Any, RunningKind] = {
    p.cumlogsumexp_p: RunningKind(jax.nn.logsumexp, jnp.logaddexp, "logaddexp"),
    p.cummax_p: RunningKind(jnp.max, jnp.maximum, "max"),
    p.cummin_p: RunningKind(jnp.min, jnp.minimum, "min"),
    p.cumprod_p: RunningKind(jnp.prod, jnp.multiply, "mul"),
    p.cumsum_p: RunningKind(jnp.sum, jnp.add, "add"),
}


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand]:
    """Writes a running reduction as the three stages."""
    axis, reverse = node.params["axis"], node.params["reverse"]
    [operand], kind = node.ins, KINDS[node.primitive]
    edges = (0, *cuts[0][axis].at, operand.shape[axis])
    axes = range(len(operand.shape))

    def running(x: jax.Array) -> jax.Array:
        return node.primitive.bind(_wide(x), axis=axis, reverse=reverse)

    def total(piece: jax.Array, starts: Any) -> list[jax.Array]:
        piece = _wide(piece)
        reduced = kind.reduce(piece, axis=axis, keepdims=True)
        return [reduced.astype(piece.dtype)]

    def before(totals: jax.Array) -> jax.Array:
        neutral = jnp.asarray(identity(kind.identity, totals.dtype), totals.dtype)
        moved = (-1, 1, 0) if reverse else (1, -1, 0)
        around = [moved if k == axis else (0, 0, 0) for k in axes]
        return lax.pad(running(totals), neutral, around)

    def of_piece(value: jax.Array, before: jax.Array) -> jax.Array:
        return kind.join(before, running(value)).astype(value.dtype)

    totals = of_each_piece(
        graph,
        total,
        node.ins,
        ins=[axes],
        outs=[axes],
        edges={axis: edges},
    )
    [rest] = graph.call(before, totals)
    window = WithinPiece(edges[-1], edges=edges, start=not reverse, stop=reverse)
    rule = functools.partial(
        in_pieces,
        value=axes,
        numbers=axes,
        windows={axis: window},
        function=of_piece,
        each=MANY,
    )
    params = {"rule": rule}
    return graph.add(PIECES, params, [operand, rest], [operand.aval])


STAGES: dict[Any, Stages] = dict.fromkeys(KINDS, in_stages)


def _wide(x: jax.Array) -> jax.Array:
    """Small floats as float32, to be rounded once, as in sums."""
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if small else x


def whole(node: Node) -> Factors:
    """The rule where the axis of the reduction is not cut."""
    return but_one(node, node.params["axis"], CARRIED)


RULES: dict[Any, RuleMaker] = dict.fromkeys(KINDS, whole)
