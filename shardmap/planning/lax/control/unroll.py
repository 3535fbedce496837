"""Unrolls loops at which a cut ends.

A loop of known length becomes its steps, so that a sum inside of a step ends a stage.
"""

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.walk import equations
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.lax.control.rows import has_unvmapped
from shardmap.planning.lax.primitives import OPTIMIZATION_BARRIER

MOST_EQUATIONS = 2048
"""The most equations of an unrolled loop, where its steps are compiled together."""

MOST_IN_STAGES = 2**16
"""The most equations if each step is a stage: all steps share their functions."""

SAMPLE = 3
"""So many steps show how a longer loop is cut."""


def unrolled(
    graph: Graph, node: Node, most: int, steps: int | None = None
) -> list[Operand] | None:
    """The results of a loop's first steps, whose rows are repeated for the others.

    Returns:
      None, and adds nothing, if there would be more than ``most`` equations.
    """
    if has_unvmapped(node.params["jaxpr"]):
        return None  # Bounds of hundreds of steps, of which most are never run.
    params, ins = node.params, node.ins
    length, body = params["length"], params["jaxpr"]
    consts, carries = scan_counts(params)
    first = consts + carries
    count = length if steps is None else min(length, steps)
    if not length or count * size_of_step(node) > most:
        return None
    carry = list(ins[consts:first])

    def rows_of(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, k, 0, keepdims=False) for k in range(count)]

    def stacked(*rows: jax.Array) -> jax.Array:
        counts = [len(part) for part in np.array_split(range(length), count)]
        pairs = zip(rows, counts, strict=True)
        return lax.concatenate([lax.broadcast(row, (n,)) for row, n in pairs], 0)

    def carried(x: Operand) -> Operand:
        # Fused with the next step, what that takes twice would be computed twice.
        return graph.add(OPTIMIZATION_BARRIER, {}, [x], [x.aval])[0]

    rows = [graph.call(rows_of, [x]) for x in ins[first:]]
    outs_of: dict[int, list[Operand]] = {}
    order = range(count)
    for k in reversed(order) if params["reverse"] else order:
        operands = [*ins[:consts], *carry, *(row[k] for row in rows)]
        outs = graph.inline(body, operands)
        carry, outs_of[k] = list(map(carried, outs[:carries])), outs[carries:]
    columns = zip(*(outs_of[k] for k in range(count)), strict=True)
    return [*carry, *(x for column in columns for x in graph.call(stacked, column))]


def size_of_step(node: Node) -> int:
    """The number of equations of a step of a scan; inner loops count once."""
    return sum(1 for _ in equations(node.params["jaxpr"])) + 3 * len(node.ins)


PRIMITIVES = frozenset({p.scan_p})
"""The primitives that can be unrolled."""
