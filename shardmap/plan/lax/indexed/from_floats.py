"""Indices that are made of floats, such as ``floor(scale * arange(n) + 0.5)``.

If they depend on no argument, JAX computes them once, and they become constants. XLA
fuses a product with a sum, or does not, so that shards, and NumPy, could round a float
to another integer than the whole function does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import bind
from shardmap.plan.engine.nodes import Graph, Node, Operand
from shardmap.plan.engine.recipe import needed
from shardmap.plan.lax.indexed import scatter
from shardmap.plan.lax.indexed.known import MOST_ELEMENTS, MOST_NODES, constant

INDICES: Mapping[Any, slice] = {
    p.gather_p: slice(1, 2),
    **dict.fromkeys(scatter.RULES, slice(1, 2)),
    p.dynamic_slice_p: slice(1, None),
    p.dynamic_update_slice_p: slice(2, None),
}
"""The operands that are indices."""


def from_floats(graph: Graph) -> Callable[[Node], Sequence[Operand] | None]:
    """Replaces what indices are made of, and is made of floats, by its values."""
    found: dict[Node, np.ndarray] = {}
    seen: set[Operand] = set()
    for node in graph.nodes:
        stack = [*node.ins[INDICES.get(node.primitive, slice(0))]]
        while stack:
            operand = stack.pop()
            made = operand.producer
            if made is None or operand in seen:
                continue
            seen.add(operand)
            if not any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in made.ins):
                stack += made.ins
            elif len(made.outs) == 1 and (array := _computed(made)) is not None:
                found[made] = array

    def replaced(node: Node) -> Sequence[Operand] | None:
        return [graph.constant(found[node])] if node in found else None

    return replaced


def _computed(node: Node) -> np.ndarray | None:
    """The result of a node; None if it depends on an argument, or takes long."""
    nodes, _ = needed(node.outs, ())
    operands = dict.fromkeys(x for each in nodes for x in each.ins)
    known = {x: constant(x) for x in operands if x.producer is None}
    size = max(out.size for each in nodes for out in each.outs)
    is_known = all(array is not None for array in known.values())
    if not is_known or size > MOST_ELEMENTS or len(nodes) > MOST_NODES:
        return None

    def fun() -> Any:
        made: dict[Operand, Any] = dict(known)
        for each in reversed(nodes):
            outs = bind(each, [made[x] for x in each.ins], each.params)
            made.update(zip(each.outs, outs, strict=True))
        return made[node.outs[0]]

    # Compiled ahead, it runs now, even if an outer function is being traced.
    return np.asarray(jax.jit(fun).lower().compile()())
