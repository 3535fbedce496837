"""Loops and branches written out, where a cut ends at them.

A loop of known length becomes its steps, one after the other, so that what a step sums
over ends a stage. A branch becomes all branches and a choice between their results.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.walk import equations
from shardmap.plan.engine.nodes import Graph, Node, Operand

MOST_EQUATIONS = 2048
"""How many equations a loop may become in functions that are compiled."""

MOST_IN_STAGES = 2**16
"""How many it may become if each step is a stage: all steps share their functions."""

SAMPLE = 3
"""How many steps show what becomes of a longer loop."""


class Opened:
    """How loops and branches are written out.

    Args:
      most: how many equations a loop may become.
      steps: how many steps of each loop are written; the others stand for them. None
        for all.

    Attributes:
      is_short: whether a loop has more steps than were written.
    """

    def __init__(self, most: int, steps: int | None = None) -> None:
        self._most, self._steps = most, steps
        self.is_short = False

    def __call__(self, graph: Graph, node: Node) -> Sequence[Operand] | None:
        """What stands for a node; None: it stays."""
        if node.primitive is p.cond_p:
            return every_branch(graph, node)
        length: int = node.params["length"]
        steps = length if self._steps is None else min(length, self._steps)
        if not length or steps * size_of_step(node) > self._most:
            return None
        self.is_short |= steps < length
        return _steps(graph, node, steps)


def size_of_step(node: Node) -> int:
    """How many equations a step of a scan becomes, those of inner loops once."""
    return sum(1 for _ in equations(node.params["jaxpr"])) + 3 * len(node.ins)


def _steps(graph: Graph, node: Node, steps: int) -> list[Operand]:
    """The steps of a scan one after the other; few of them may stand for all."""
    params, ins = node.params, node.ins
    length, body = params["length"], params["jaxpr"]
    consts, carries = scan_counts(params)
    first = consts + carries
    carry = list(ins[consts:first])
    rows = [_rows(graph, x, steps) for x in ins[first:]]
    made: dict[int, list[Operand]] = {}
    order = range(steps)
    for k in reversed(order) if params["reverse"] else order:
        operands = [*ins[:consts], *carry, *(row[k] for row in rows)]
        outs = graph.inline(body, operands)
        carry, made[k] = outs[:carries], outs[carries:]
    columns = zip(*(made[k % steps] for k in range(length)), strict=True)
    return [*carry, *(_stacked(graph, column) for column in columns)]


def _rows(graph: Graph, x: Operand, count: int) -> list[Operand]:
    def rows(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, k, 0, keepdims=False) for k in range(count)]

    return graph.call(rows, [x])


def _stacked(graph: Graph, rows: Sequence[Operand]) -> Operand:
    def stacked(*rows: jax.Array) -> jax.Array:
        return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)

    [found] = graph.call(stacked, rows)
    return found


def every_branch(graph: Graph, node: Node) -> list[Operand] | None:
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


PRIMITIVES = frozenset({p.scan_p, p.cond_p})
"""What can be written out."""
