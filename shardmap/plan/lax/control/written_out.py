"""Loops, branches and maps written out, where a cut ends at them.

A loop of known length becomes its steps, one after the other, so that what a step sums
over ends a stage. A branch becomes all branches and a choice between their results. A
map whose elements talk becomes one function of all elements.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import AnyJaxpr
from shardmap._jax.walk import equations
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.tracing import Batch
from shardmap.plan.engine.nodes import (
    Graph,
    Node,
    Operand,
    traced,
)
from shardmap.plan.engine.rules import Cut, Stages

MOST_EQUATIONS = 2048
"""How many equations a loop may become."""


def steps_of_scan(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """The steps of a scan one after the other."""
    params, ins = node.params, node.ins
    length, body = params["length"], params["jaxpr"]
    if length * (_size(body) + 3 * len(ins)) > MOST_EQUATIONS or not length:
        return None
    consts, carries = scan_counts(params)
    first = consts + carries
    carry = list(ins[consts:first])
    rows = [_rows(graph, x, length) for x in ins[first:]]
    made: dict[int, list[Operand]] = {}
    order = range(length)
    for k in reversed(order) if params["reverse"] else order:
        operands = [*ins[:consts], *carry, *(row[k] for row in rows)]
        outs = graph.inline(body, operands)
        carry, made[k] = outs[:carries], outs[carries:]
    columns = zip(*(made[k] for k in order), strict=True)
    return [*carry, *(_stacked(graph, column) for column in columns)]


def _size(jaxpr: AnyJaxpr) -> int:
    """How many equations a jaxpr has, those of each inner one once."""
    return sum(1 for _ in equations(jaxpr))


def _rows(graph: Graph, x: Operand, length: int) -> list[Operand]:
    def rows(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, k, 0, keepdims=False) for k in range(length)]

    return graph.call(rows, [x])


def _stacked(graph: Graph, rows: Sequence[Operand]) -> Operand:
    def stacked(*rows: jax.Array) -> jax.Array:
        return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)

    [found] = graph.call(stacked, rows)
    return found


def every_branch(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """All branches, and a choice: what is not chosen is computed for nothing."""
    branches = node.params["branches"]
    if any(e.primitive is p.while_p for jaxpr in branches for e in equations(jaxpr)):
        return None  # One that is not chosen might never end.
    index, *operands = node.ins
    results = [graph.inline(jaxpr, operands) for jaxpr in branches]

    def choose(index: jax.Array, *cases: jax.Array) -> jax.Array:
        last = np.int32(len(cases) - 1)
        which = lax.clamp(np.int32(0), index.astype("int32"), last)
        return lax.select_n(which, *cases)

    found = []
    for cases in zip(*results, strict=True):
        found += graph.call(choose, [index, *cases])
    return found


def all_elements(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """A map as one function of all its elements."""
    params = node.params
    batch = Batch(params["axis_name"], params["axis_size"])
    mapped = batch.vectorize(
        params["call_jaxpr"], params["in_axes"], list(params["out_axes"])
    )
    try:
        made = traced(mapped, node.ins)
    except (NotImplementedError, ValueError):
        return None  # Not all that a map may hold can be vectorised.
    return graph.inline(made, node.ins)


STAGES: dict[Any, Stages] = {
    p.cond_p: every_branch,
    p.scan_p: steps_of_scan,
    spmap_p: all_elements,
}
"""What can be written out, and how."""
