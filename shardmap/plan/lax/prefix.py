"""Running reductions along an axis that is cut: ``cumsum`` and its like.

Written as three steps, each a stage of its own: what every piece comes to, what stands
before every piece, and the running reduction of a piece that starts from there. Where
the pieces lie is known only when cuts have been followed, so that the rewriting is made
for a graph whose first analysis ended at such an equation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.plan.engine.factors import Factors
from shardmap.plan.engine.nodes import Graph, Node, Operand, PlanPrimitive
from shardmap.plan.engine.pieces import WithinPiece, in_pieces, of_pieces
from shardmap.plan.engine.rules import MANY, Cut, Reason, RuleMaker, Stages
from shardmap.plan.lax.staged.barrier import barrier

CARRIED = Reason(
    "each element depends on all before it", "cut another axis, which is independent"
)


class RunningKind(NamedTuple):
    """How a running reduction combines: a whole piece, and two results."""

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


TOTALS, RUNNING = PlanPrimitive("piece totals"), PlanPrimitive("running pieces")


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand]:
    """A running reduction as totals of pieces, what is before each, and the pieces."""
    axis, reverse = node.params["axis"], node.params["reverse"]
    aval, kind = node.outs[0].aval, KINDS[node.primitive]
    edges = (0, *cuts[0][axis].at, aval.shape[axis])
    params = {**node.params, "edges": edges, "primitive": node.primitive}
    shape = list(aval.shape)
    shape[axis] = len(edges) - 1
    few = jax.core.ShapedArray(tuple(shape), _wide(aval.dtype))
    [totals] = graph.add(TOTALS, params, node.ins, [few])
    others = [k for k in range(len(shape)) if k != axis]
    complete = barrier(graph, totals, passing=others)

    def before(totals: jax.Array) -> jax.Array:
        edge = list(shape)
        edge[axis] = 1
        neutral = identity(kind.identity, totals.dtype)
        found = [lax.full(edge, neutral, totals.dtype), _running(node, totals)]
        count = shape[axis]
        if reverse:
            return lax.slice_in_dim(
                lax.concatenate(found[::-1], axis), 1, None, axis=axis
            )
        return lax.slice_in_dim(lax.concatenate(found, axis), 0, count, axis=axis)

    return graph.add(
        RUNNING, params, [*node.ins, *graph.call(before, [complete])], [aval]
    )


STAGES: dict[Any, Stages] = dict.fromkeys(KINDS, in_stages)


def _wide(dtype: np.dtype) -> np.dtype:
    """Small floats are kept in float32 and rounded once, as where they are summed."""
    small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if small else dtype


def _running(node: Node, value: jax.Array) -> jax.Array:
    params = {name: node.params[name] for name in ("axis", "reverse")}
    primitive = node.params.get("primitive", node.primitive)
    return primitive.bind(value.astype(_wide(value.dtype)), **params)


def piece_totals(node: Node) -> Factors:
    """``i~ j -> i j``: what each piece comes to."""
    axis, axes = node.params["axis"], range(len(node.in_shapes[0]))
    kind = KINDS[node.params["primitive"]]

    def total(piece: jax.Array, starts: Any) -> list[jax.Array]:
        piece = piece.astype(_wide(piece.dtype))
        found = kind.reduce(piece, axis=axis, keepdims=True)
        return [found.astype(piece.dtype)]

    edges = {axis: node.params["edges"]}
    return of_pieces(node, [axes], [axes], edges, total, each=MANY)


def running_pieces(node: Node) -> Factors:
    """``i j, i~ j -> i j``: from what stands before each piece."""
    axis, axes = node.params["axis"], range(len(node.in_shapes[0]))
    edges, kind = node.params["edges"], KINDS[node.params["primitive"]]

    def piece(value: jax.Array, before: jax.Array) -> jax.Array:
        return kind.join(before, _running(node, value)).astype(value.dtype)

    reverse = node.params["reverse"]
    window = WithinPiece(edges[-1], edges=edges, start=not reverse, stop=reverse)
    return in_pieces(node, axes, axes, axis, edges, piece, window, each=MANY)


def whole(node: Node) -> Factors:
    """``i j -> i j``, the axis that is run over whole, as long as it is not cut."""
    axes = range(len(node.in_shapes[0]))
    wholes = {node.params["axis"]: CARRIED}
    return Factors(node, [axes], [axes], wholes=wholes, cheap=False, each=MANY)


RULES: dict[Any, RuleMaker] = {
    TOTALS: piece_totals,
    RUNNING: running_pieces,
    **dict.fromkeys(KINDS, whole),
}
