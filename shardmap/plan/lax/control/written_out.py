"""Loops, branches and maps written out, where a cut ends at them.

A loop of known length becomes its steps, one after the other, so that what a step sums
over ends a stage. A branch becomes all branches and a choice between their results. A
map whose elements talk becomes one function of all elements.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import AnyJaxpr, Equation
from shardmap._jax.walk import equations
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.tracing import Batch
from shardmap.plan.engine.nodes import (
    Calls,
    Graph,
    Node,
    Operand,
    Rewrite,
    traced,
)

MOST_EQUATIONS = 2048
"""How many equations a loop may become."""


def rewrite(nodes: Sequence[Node], calls: Callable[[], Calls]) -> dict[Any, Rewrite]:
    """Writes out the equations that these nodes come from.

    Args:
      nodes: of `WRITERS`.
      calls: what is looked through inside of them.
    """
    chosen = {id(node.params): node for node in nodes}

    def writer(write: Callable[..., Any]) -> Rewrite:
        def written(
            graph: Graph, equation: Equation, ins: Sequence[Operand], source: str
        ) -> Sequence[Operand] | None:
            if id(equation.params) not in chosen:
                return None

            def inline(jaxpr: AnyJaxpr, operands: Sequence[Operand]) -> list[Operand]:
                return graph.inline(jaxpr, operands, source, calls())

            found: Sequence[Operand] | None = write(equation.params, ins, inline)
            return found

        return written

    primitives = {node.primitive for node in nodes}
    return {q: writer(write) for q, write in WRITERS.items() if q in primitives}


Inline = Callable[[AnyJaxpr, Sequence[Operand]], list[Operand]]


def steps_of_scan(
    params: Mapping[str, Any], ins: Sequence[Operand], inline: Inline
) -> list[Operand] | None:
    """The steps of a scan one after the other."""
    length, body = params["length"], params["jaxpr"]
    if length * (_size(body) + 3 * len(ins)) > MOST_EQUATIONS or not length:
        return None
    consts, carries = scan_counts(params)
    first = consts + carries
    carry = list(ins[consts:first])
    rows = [_rows(x, length, inline) for x in ins[first:]]
    made: dict[int, list[Operand]] = {}
    order = range(length)
    for k in reversed(order) if params["reverse"] else order:
        operands = [*ins[:consts], *carry, *(row[k] for row in rows)]
        outs = inline(body, operands)
        carry, made[k] = outs[:carries], outs[carries:]
    columns = zip(*(made[k] for k in order), strict=True)
    return [*carry, *(_stacked(list(column), inline) for column in columns)]


def _size(jaxpr: AnyJaxpr) -> int:
    """How many equations a jaxpr has, those of each inner one once."""
    return sum(1 for _ in equations(jaxpr))


def _rows(x: Operand, length: int, inline: Inline) -> list[Operand]:
    def rows(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, k, 0, keepdims=False) for k in range(length)]

    return inline(traced(rows, [x]), [x])


def _stacked(rows: list[Operand], inline: Inline) -> Operand:
    def stacked(*rows: jax.Array) -> jax.Array:
        return lax.concatenate([lax.expand_dims(row, (0,)) for row in rows], 0)

    [found] = inline(traced(stacked, rows), rows)
    return found


def every_branch(
    params: Mapping[str, Any], ins: Sequence[Operand], inline: Inline
) -> list[Operand] | None:
    """All branches, and a choice: what is not chosen is computed for nothing."""
    branches = params["branches"]
    if any(e.primitive is p.while_p for jaxpr in branches for e in equations(jaxpr)):
        return None  # One that is not chosen might never end.
    index, *operands = ins
    results = [inline(jaxpr, operands) for jaxpr in branches]

    def choose(index: jax.Array, *cases: jax.Array) -> jax.Array:
        last = np.int32(len(cases) - 1)
        which = lax.clamp(np.int32(0), index.astype("int32"), last)
        return lax.select_n(which, *cases)

    found = []
    for cases in zip(*results, strict=True):
        found += inline(traced(choose, [index, *cases]), [index, *cases])
    return found


def all_elements(
    params: Mapping[str, Any], ins: Sequence[Operand], inline: Inline
) -> list[Operand] | None:
    """A map as one function of all its elements."""
    batch = Batch(params["axis_name"], params["axis_size"])
    mapped = batch.vectorize(
        params["call_jaxpr"], params["in_axes"], list(params["out_axes"])
    )
    try:
        made = traced(mapped, ins)
    except (NotImplementedError, ValueError):
        return None  # Not all that a map may hold can be vectorised.
    return inline(made, ins)


WRITERS: dict[Any, Callable[..., Any]] = {
    p.cond_p: every_branch,
    p.scan_p: steps_of_scan,
    spmap_p: all_elements,
}
"""What can be written out, and how."""
