"""Cuts the QR and the SVD of tall matrices along their rows (TSQR).

Each piece keeps its first rows, as many as there are columns, above the R factor of the
others. The R factor of all these, stacked, is that of the matrix, with its signs: they
follow from the first rows (Ballard and others, 2014). The singular values are those of
R, as in LAPACK for matrices that are this tall.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Local
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import Cut, Factor, Reason, Stages
from shardmap.planning.lax.batched import CORE
from shardmap.planning.lax.staged.pieces import (
    edges_of,
    of_each_piece,
    within_pieces,
)


def is_tall(node: Node) -> bool:
    """Whether it can be computed from the R factors of pieces."""
    if len(node.ins) != 1 or len(node.in_shapes[0]) != 2:
        return False
    if node.primitive is p.qr_p:
        whole = node.params["full_matrices"] or node.params.get("pivoting")
    elif node.primitive is p.svd_p:
        whole = node.params["full_matrices"] and node.params["compute_uv"]
    else:
        return False
    rows, columns = node.in_shapes[0]
    return not whole and rows >= 2 * columns > 0


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Writes a QR as those of pieces and of their R factors; an SVD as that of R."""
    if not is_tall(node):
        return None
    [operand] = node.ins
    rows, columns = operand.shape
    edges = edges_of(cuts[0][0].at, rows, 2 * columns)
    if len(edges) < 3:
        return None
    q, r = _qr(graph, operand, edges)
    if node.primitive is p.qr_p:
        return [q, r]
    # An SVD returns the singular values, and u and the transposed v if asked for.
    [singular, *sides] = [out.aval for out in node.outs]
    small = [jax.core.ShapedArray((columns, columns), each.dtype) for each in sides]
    values, *vectors = graph.add(p.svd_p, node.params, [r], [singular, *small])
    if not vectors:
        return [values]
    u, v = vectors
    [left] = graph.call(lambda q, u: q @ u, [q, u])
    return [values, left, v]


STAGES: dict[Any, Stages] = dict.fromkeys([p.qr_p, p.svd_p], in_stages)


def _qr(graph: Graph, operand: Operand, edges: tuple[int, ...]) -> list[Operand]:
    columns = operand.shape[1]

    def of_piece(piece: jax.Array, start: Any) -> list[jax.Array]:
        r = jnp.linalg.qr(piece[columns:], mode="r")
        return [jnp.concatenate([piece[:columns], r])[None]]

    def of_all(factors: jax.Array) -> list[jax.Array]:
        """The matrix that the Q of each piece is multiplied with, and R."""
        q, r = jnp.linalg.qr(factors.reshape(-1, columns))
        return [q.reshape(factors.shape), r]

    def rows(local: Local) -> list[jax.Array]:
        """The rows of Q: each piece that they lie in is factored again."""
        x, turns = local.values
        begin, *lengths = local.holes[0, 0]
        every = []
        for piece, turn in zip(
            jnp.split(x, np.cumsum(lengths)[:-1]), turns, strict=True
        ):
            q, _ = jnp.linalg.qr(piece[columns:])
            every.append(turn[:columns])
            every.append(jnp.matmul(q, turn[columns:], precision="highest"))
        return [jnp.concatenate(every)[begin : begin + local.sizes["row"]]]

    wholes: dict[Factor, Reason] = dict.fromkeys(range(3), CORE)
    of_pieces = of_each_piece(
        *(graph, of_piece, operand, ["row", 0], [["row", 1, 2]]),
        factor="row",
        edges=edges,
        wholes=wholes,
    )
    turns, r = graph.call(of_all, of_pieces)
    q = within_pieces(
        *(graph, rows, (operand, turns), [["row", 0], ["row", 1, 2]]),
        factor="row",
        edges=edges,
        wholes=wholes,
    )
    return [q, r]
