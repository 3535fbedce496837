"""Cuts ``top_k`` along its axis: the largest of each piece, then the largest of these.

Equal elements keep their order, as pieces do.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import Cut, Stages
from shardmap.planning.lax.batched import CORE
from shardmap.planning.lax.staged.pieces import edges_of, of_each_piece


def in_stages(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Writes a ``top_k`` in two stages; None without two pieces of k elements."""
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

    axes = range(axis + 1)
    of_pieces = of_each_piece(
        *(graph, of_piece, operand, axes, [[*axes, "k"]] * 2),
        factor=axis,
        edges=edges,
        wholes={"k": CORE},
    )
    return graph.call(of_all, of_pieces)


STAGES: dict[Any, Stages] = {p.top_k_p: in_stages}
