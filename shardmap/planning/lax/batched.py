"""Rules of FFTs, linear algebra, sorts and running reductions: batch axes pass.

Others are whole. Some operations are cut along these too, in stages: of each piece, of
the results of all pieces, and of each piece again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Factors, Local, taken_whole
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import MANY, Cut, Factor, Reason, RuleMaker, Stages
from shardmap.planning.lax.on_cpu import sorted_operands
from shardmap.planning.lax.primitives import PIVOTS
from shardmap.planning.lax.reduce import wide
from shardmap.planning.lax.staged.pieces import (
    CORE,
    edges_of,
    of_each_piece,
    within_pieces,
)


def core(core_rank: int) -> Callable[[Node], Factors]:
    """The rule of primitives whose last axes, this many of an operand, are whole."""
    return lambda node: taken_whole(
        node, CORE, range(len(node.in_shapes[0]) - core_rank)
    )


def axis_by_axis(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """Writes a transform of several axes as one per axis: other axes can be cut."""
    kind, lengths = node.params["fft_type"], tuple(node.params["fft_lengths"])
    count = len(lengths)
    if count < 2:
        return None
    real = kind in (lax.FftType.RFFT, lax.FftType.IRFFT)
    forward = kind in (lax.FftType.FFT, lax.FftType.RFFT)
    others = lax.FftType.FFT if forward else lax.FftType.IFFT

    def transformed(x: jax.Array) -> jax.Array:
        steps = [(k - count, others, lengths[k]) for k in range(count - 1)]
        last = (-1, kind if real else others, lengths[-1])
        # The real axis comes first, or last in an inverse transform.
        for axis, how, length in [last, *steps] if forward else [*steps, last]:
            moved = jnp.moveaxis(x, axis, -1)
            x = jnp.moveaxis(lax.fft(moved, how, (length,)), -1, axis)
        return x

    return graph.call(transformed, node.ins)


def largest_of_pieces(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Writes a ``top_k`` as that of what the pieces have; None without two of them.

    Each has k elements at least. Equal elements keep their order, as pieces do.
    """
    [operand] = node.ins
    axis = len(operand.shape) - 1
    edges = edges_of(cuts[0][axis].at, operand.shape[axis], node.params["k"])
    if node.params.get("axis", axis) not in (axis, -1) or len(edges) < 3:
        return None

    def of_piece(piece: jax.Array, start: jax.Array) -> list[jax.Array]:
        values, places = p.top_k_p.bind(piece, **node.params)
        places = places + jnp.asarray(start, places.dtype)
        return [lax.expand_dims(each, (axis,)) for each in (values, places)]

    def of_all(values: jax.Array, places: jax.Array) -> list[jax.Array]:
        values, places = (lax.collapse(x, x.ndim - 2) for x in (values, places))
        best, index = p.top_k_p.bind(values, **node.params)
        return [best, jnp.take_along_axis(places, index, axis)]

    of_pieces = of_each_piece(graph, of_piece, operand, axis, edges, range(axis))
    return graph.call(of_all, of_pieces)


def tall_in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Writes a tall QR as those of pieces and of their R factors; an SVD as that of R.

    Each piece keeps its first rows, as many as there are columns, above the R factor of
    the others. The R factor of all these, stacked, is that of the matrix, with its
    signs: they follow from the first rows (Ballard and others, 2014). The singular
    values are those of R, as in LAPACK for matrices that are this tall.
    """
    [operand], params = node.ins, node.params
    is_whole = params["full_matrices"] and params.get("compute_uv", True)
    if is_whole or params.get("pivoting") or len(operand.shape) != 2:
        return None
    rows, columns = operand.shape
    edges = edges_of(cuts[0][0].at, rows, 2 * columns)
    if len(edges) < 3:
        return None
    q, r = _qr(graph, operand, edges)
    if node.primitive is p.qr_p:
        return [q, r]

    def of_svd(q: jax.Array, r: jax.Array) -> list[jax.Array]:
        values, *sides = p.svd_p.bind(r, **params)
        return [values, q @ sides[0], sides[1]] if sides else [values]

    return graph.call(of_svd, [q, r])


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
        return [jnp.concatenate(every)[begin : begin + local.sizes[0]]]

    turns, r = graph.call(of_all, of_each_piece(graph, of_piece, operand, 0, edges))
    return [within_pieces(graph, rows, (operand, turns), 0, edges), r]


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


def running_in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand]:
    """Writes a running reduction, such as ``cumsum``, as three stages.

    They compute the total of each piece, the total of all pieces before each, and the
    running reduction of each piece, combined with the latter.
    """
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


STAGES: dict[Any, Stages] = {
    **dict.fromkeys(KINDS, running_in_stages),
    p.fft_p: axis_by_axis,
    p.top_k_p: largest_of_pieces,
    **dict.fromkeys([p.qr_p, p.svd_p], tall_in_stages),
}


def but_one(node: Node, axis: int, reason: Reason) -> Factors:
    """``i j, i j -> i j, i j`` with one axis whole."""
    axes = range(len(node.in_shapes[0]))
    ins, outs = [axes] * len(node.ins), [axes] * len(node.outs)
    return Factors(node, ins, outs, wholes={axis: reason}, cheap=False, each=MANY)


def sort(node: Node) -> Factors:
    reason = Reason("sorting may move an element anywhere", "cut another axis")
    return replace(
        but_one(node, node.params["dimension"], reason),
        emitter=lambda local: sorted_operands(node.params, local.values),
    )


def top_k(node: Node) -> Factors:
    """``i j -> i k, i k``."""
    rank = len(node.in_shapes[0])
    axis = node.params.get("axis", node.params.get("reduction_dimension", rank - 1))
    axis %= rank
    reason = Reason("the largest may stand anywhere in the axis", "cut another axis")
    return taken_whole(node, reason, {*range(rank)} - {axis})


def triangular_solve(node: Node) -> Factors:
    """``i * *, i * j -> i * j``: right-hand sides can be cut."""
    batch = range(len(node.in_shapes[0]) - 2)
    sides = ["core", "side"] if node.params["left_side"] else ["side", "core"]
    ins = [[*batch, "core", "core"], [*batch, *sides]]
    wholes: dict[Factor, Reason] = {"core": CORE}
    return Factors(node, ins, ins[1:], wholes=wholes, cheap=False, each=MANY)


MATRICES = [
    *(p.cholesky_p, p.eig_p, p.eigh_p, p.hessenberg_p, p.householder_product_p),
    *(p.lu_p, p.qr_p, p.schur_p, p.svd_p, p.tridiagonal_p),
]

RULES: dict[Any, RuleMaker] = {
    **dict.fromkeys([p.approx_top_k_p, p.top_k_p], top_k),
    **dict.fromkeys(MATRICES, core(2)),
    **dict.fromkeys([p.tridiagonal_solve_p, PIVOTS], core(1)),
    p.fft_p: lambda node: core(len(node.params["fft_lengths"]))(node),
    p.sort_p: sort,
    p.triangular_solve_p: triangular_solve,
}

CUMULATIVE: dict[Any, RuleMaker] = dict.fromkeys(
    KINDS, lambda node: but_one(node, node.params["axis"], CARRIED)
)
"""The rules of running reductions."""
