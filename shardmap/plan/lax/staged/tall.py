"""QR and singular values of tall matrices whose rows are cut.

Each piece has a triangle of its own, and all triangles, one below the other, have that
of the whole (TSQR). Its signs are made those of LAPACK, which go by what reflections
leave on the diagonal: they follow from the first rows of Q. Singular values are those
of the triangle; LAPACK takes the same way for matrices that are this tall.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors
from shardmap.plan.engine.nodes import Graph, Node, Operand, PlanPrimitive, Value
from shardmap.plan.engine.pieces import WithinPiece, in_pieces, of_pieces
from shardmap.plan.engine.rules import MANY, Cut, RuleMaker, Stages
from shardmap.plan.lax.batched import CORE
from shardmap.plan.lax.staged.barrier import barrier

TRIANGLES, ONE_TRIANGLE, ROWS = map(
    PlanPrimitive, ("triangles of pieces", "triangle of all", "orthogonal rows")
)


def is_tall(node: Node) -> bool:
    """Whether it may be computed of triangles, if its rows are cut."""
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


def edges_of(cut: Cut, rows: int, columns: int) -> tuple[int, ...]:
    """Pieces that are at least as tall as they are wide."""
    found = [0]
    for point in cut.at:
        if point - found[-1] >= columns and rows - point >= columns:
            found.append(point)
    return (*found, rows)


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """A QR as those of pieces and one of their triangles, and an SVD by that of R."""
    if not is_tall(node):
        return None
    [operand] = node.ins
    edges = edges_of(cuts[0][0], *operand.shape)
    if len(edges) < 3:
        return None
    q, r = _qr(graph, operand, edges)
    if node.primitive is p.qr_p:
        return [q, r]
    # What svd gives: singular values, and with vectors u and the transposed v.
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


def _qr(graph: Graph, operand: Operand, edges: tuple[int, ...]) -> list[Value]:
    columns, dtype = operand.shape[1], operand.aval.dtype
    params = {"edges": edges}
    few = jax.core.ShapedArray((len(edges) - 1, columns, columns), dtype)
    small = jax.core.ShapedArray((columns, columns), dtype)
    found = graph.add(TRIANGLES, params, [operand], [few, few])
    complete = [barrier(graph, each) for each in found]
    turns, r = graph.add(ONE_TRIANGLE, params, complete, [few, small])
    return [*graph.add(ROWS, params, [operand, turns], [operand.aval]), r]


def triangles(node: Node) -> Factors:
    """``i~ * -> i * *, i * *``: the triangle of each piece, and the first rows of Q."""

    def of_piece(piece: jax.Array, starts: Any) -> list[jax.Array]:
        q, r = jnp.linalg.qr(piece)
        return [r[None], q[: piece.shape[1]][None]]

    return of_pieces(
        *(node, [["row", 0]], [["row", 1, 2], ["row", 3, 4]]),
        *({"row": node.params["edges"]}, of_piece),
        wholes=dict.fromkeys(range(5), CORE),
        each=MANY,
    )


def rows(node: Node) -> Factors:
    """``i *, i~ * * -> i *``: the rows of Q of each piece."""
    edges: tuple[int, ...] = node.params["edges"]

    def of_piece(piece: jax.Array, turn: jax.Array) -> jax.Array:
        q, _ = jnp.linalg.qr(piece)
        return jnp.matmul(q, turn[0], precision="highest")

    return in_pieces(
        *(node, ["row", 0], ["row", 1, 2], "row", edges, of_piece),
        WithinPiece(edges[-1], edges=edges),
        wholes=dict.fromkeys(range(3), CORE),
        each=MANY,
    )


def one_triangle(node: Node) -> Factors:
    """``* * *, * * * -> * * *, * *``: the triangle of all, and how each Q is turned."""
    few, small = node.in_shapes[0], node.out_shapes[1]
    axes = list(range(len(few)))

    def emitter(local: Any) -> Sequence[Any]:
        triangles, tops = local.values
        columns = small[0]
        q, r = jnp.linalg.qr(triangles.reshape(-1, columns))
        turns = q.reshape(few)
        signs = householder_signs(jnp.matmul(tops[0], turns[0], precision="highest"))
        return [turns * signs[None, None], r * jnp.conj(signs)[:, None]]

    return Factors(
        node,
        [axes, axes],
        [axes, axes[1:]],
        wholes=dict.fromkeys(axes, CORE),
        emitter=emitter,
        cheap=False,
    )


def householder_signs(top: jax.Array) -> jax.Array:
    """The signs of Q's columns for which reflections give it, from its first rows.

    Reflection ``k`` brings a column to the k-th axis, to the side away from it. What
    all reflections do to the first rows is an elimination (Ballard and others, 2014).
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


RULES: dict[Any, RuleMaker] = {
    TRIANGLES: triangles,
    ONE_TRIANGLE: one_triangle,
    ROWS: rows,
}
