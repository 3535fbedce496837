"""The largest along an axis that is cut: those of each piece, and the largest of these.

A stage takes the largest of every piece, and the next one those of all pieces. Equal
elements stay in their order, as pieces do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors, Local
from shardmap.plan.engine.nodes import Graph, Node, Operand, PlanPrimitive
from shardmap.plan.engine.pieces import of_pieces
from shardmap.plan.engine.rules import MANY, Cut, Factor, Reason, RuleMaker, Stages
from shardmap.plan.lax.batched import CORE
from shardmap.plan.lax.staged.barrier import barrier

EACH_PIECE, ALL_PIECES = (
    PlanPrimitive("largest of pieces"),
    PlanPrimitive("largest of all"),
)


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """The largest of each piece, and of all; None if pieces are too short for that."""
    [operand], k = node.ins, node.params["k"]
    if axis_of(node.params, operand.shape) is None:
        return None
    edges = _edges(cuts[0][-1].at, operand.shape[-1], k)
    if len(edges) < 3:
        return None
    params = {**node.params, "edges": edges}
    shape = (*operand.shape[:-1], len(edges) - 1, k)
    few = [jax.core.ShapedArray(shape, out.aval.dtype) for out in node.outs]
    found = graph.add(EACH_PIECE, params, node.ins, few)
    others = range(operand.aval.ndim - 1)
    complete = [barrier(graph, each, passing=others) for each in found]
    return graph.add(ALL_PIECES, params, complete, [out.aval for out in node.outs])


STAGES: dict[Any, Stages] = {p.top_k_p: in_stages}


def axis_of(params: Mapping[str, Any], shape: Sequence[int]) -> int | None:
    """The axis along which the largest are taken, if it is the last one."""
    last = len(shape) - 1
    return last if params.get("axis", last) in (last, -1) else None


def _edges(points: Sequence[int], size: int, k: int) -> tuple[int, ...]:
    """Pieces of at least ``k`` elements, for each to have that many largest."""
    found = [0]
    for point in points:
        if point - found[-1] >= k > 0 and size - point >= k:
            found.append(point)
    return (*found, size)


def _largest(node: Node, values: jax.Array) -> Sequence[jax.Array]:
    params = {name: each for name, each in node.params.items() if name != "edges"}
    return p.top_k_p.bind(values, **params)


def of_each_piece(node: Node) -> Factors:
    """``i j~ -> i j *, i j *``: the largest of each piece, and where they stand."""
    axis = len(node.in_shapes[0]) - 1
    axes = range(axis + 1)

    def largest(piece: jax.Array, starts: Mapping[Any, jax.Array]) -> list[jax.Array]:
        values, places = _largest(node, piece)
        places = places + starts[axis].astype(places.dtype)
        return [lax.expand_dims(each, (axis,)) for each in (values, places)]

    return of_pieces(
        *(node, [axes], [[*axes, "k"]] * 2, {axis: node.params["edges"]}, largest),
        starts=[axis],
        wholes={"k": CORE},
        each=MANY,
    )


def of_all_pieces(node: Node) -> Factors:
    """``i * *, i * * -> i *, i *``: the largest of those of all pieces."""
    axis = len(node.out_shapes[0]) - 1
    batch = list(range(axis))

    def emitter(local: Local) -> Sequence[jax.Array]:
        largest, places = (v.reshape(*v.shape[:-2], -1) for v in local.values)
        best, index = _largest(node, largest)
        return [best, jnp.take_along_axis(places, index, axis)]

    wholes: dict[Factor, Reason] = dict.fromkeys(["piece", "k", "largest"], CORE)
    return Factors(
        *(node, [[*batch, "piece", "k"]] * 2, [[*batch, "largest"]] * 2),
        wholes=wholes,
        emitter=emitter,
        cheap=False,
        each=MANY,
    )


RULES: dict[Any, RuleMaker] = {EACH_PIECE: of_each_piece, ALL_PIECES: of_all_pieces}
