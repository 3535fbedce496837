"""Cuts the QR and the SVD of tall matrices along their rows (TSQR).

Each piece has an R factor. The R factor of all these, stacked, is that of the matrix.
Its signs are changed to those of LAPACK, which follow from the first rows of Q. The
singular values are those of R, as in LAPACK for matrices that are this tall.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import (
    MANY,
    Cut,
    Factor,
    Reason,
    Stages,
    Windowed,
)
from shardmap.planning.lax.batched import CORE
from shardmap.planning.lax.staged.pieces import (
    PIECES,
    Numbers,
    WithinPiece,
    edges_of,
    of_each_piece,
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
    edges = edges_of(cuts[0][0].at, *operand.shape)
    if len(edges) < 3:
        return None
    q, r = _qr(graph, operand, edges)
    if node.primitive is p.qr_p:
        return [q, r]
    # An SVD returns the singular values, and u and the transposed v if asked for.
    [singular, *sides] = [out.aval for out in node.outs]
    columns = operand.shape[1]
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
        q, r = jnp.linalg.qr(piece)
        return [r[None], q[:columns][None]]

    def of_all(triangles: jax.Array, tops: jax.Array) -> list[jax.Array]:
        """R, and the matrix that the Q of each piece is multiplied with."""
        q, r = jnp.linalg.qr(triangles.reshape(-1, columns))
        turns = q.reshape(triangles.shape)
        signs = householder_signs(jnp.matmul(tops[0], turns[0], precision="highest"))
        return [turns * signs[None, None], r * jnp.conj(signs)[:, None]]

    def rows(local: Local) -> list[jax.Array]:
        """The rows of Q: each piece that they lie in is factored again."""
        x, turns = local.values
        begin, *lengths = local.holes[0, 0]
        pieces = jnp.split(x, np.cumsum(lengths)[:-1])
        every = [
            jnp.matmul(jnp.linalg.qr(piece)[0], turn, precision="highest")
            for piece, turn in zip(pieces, turns, strict=True)
        ]
        return [jnp.concatenate(every)[begin : begin + local.sizes["row"]]]

    wholes: dict[Factor, Reason] = dict.fromkeys(range(5), CORE)
    of_pieces = of_each_piece(
        *(graph, of_piece, operand, ["row", 0], [["row", 1, 2], ["row", 3, 4]]),
        factor="row",
        edges=edges,
        wholes=wholes,
    )
    turns, r = graph.call(of_all, of_pieces)
    within = Windowed("row", WithinPiece(edges[-1], edges=edges))
    number = Windowed("row", Numbers(len(edges) - 1, edges=edges))
    rule = functools.partial(
        Factors,
        ins=[[within, 0], [number, 1, 2]],
        outs=[["row", 0]],
        wholes=dict.fromkeys(range(3), CORE),
        emitter=rows,
        cheap=False,
        complete=frozenset({1}),
        each=MANY,
    )
    q = graph.add(PIECES, {"rule": rule}, [operand, turns], [operand.aval])
    return [*q, r]


def householder_signs(top: jax.Array) -> jax.Array:
    """The signs that Householder reflections give the columns of Q.

    Reflection ``k`` maps a column to the k-th axis, away from the column. All of them
    act on its first rows, ``top``, as an elimination (Ballard and others, 2014).
    """
    columns = top.shape[0]

    def step(k: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, signs = carry
        pivot = rest[k, k]
        sign = jnp.where(pivot.real < 0, 1.0, -1.0).astype(top.dtype)
        later = jnp.arange(columns) > k
        column = jnp.where(later, rest[:, k] / (pivot - sign), 0)
        row = jnp.where(later, rest[k], 0)
        return rest - column[:, None] * row[None], signs.at[k].set(sign)

    signs = jnp.ones((columns,), top.dtype)
    return lax.fori_loop(0, columns, step, (top, signs))[1]
