"""Slices and updates of slices that start at a place that may be unknown."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite, Scalar
from shardmap.planning.engine.rules import Axis, RuleMaker, Windowed
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.indexed.known import evaluated
from shardmap.planning.lax.indexed.places import WRITTEN, as_int32


def dynamic_slice(graph: Graph, node: Node) -> list[Operand]:
    """Writes a slice as one with literal starts, and as a gather of one place."""
    sizes, every = node.out_shapes[0], node.ins[1:]
    unknown = [
        k
        for k, start in enumerate(every)
        if sizes[k] != node.in_shapes[0][k] and not isinstance(start, Scalar)
    ]
    numbers = lax.GatherDimensionNumbers(tuple(range(len(sizes))), (), tuple(unknown))

    def taken(x: jax.Array, *starts: jax.Array) -> jax.Array:
        for k, start in enumerate(every):
            if isinstance(start, Scalar):
                # As JAX does it: the start moves, so that all elements exist.
                first = min(max(int(start.value), 0), x.shape[k] - sizes[k])
                x = lax.slice_in_dim(x, first, first + sizes[k], axis=k)
        if not unknown:
            return x
        places = jnp.stack([starts[k] for k in unknown])
        return lax.gather(x, places, numbers, sizes, mode="clip")

    return graph.call(taken, node.ins)


def dynamic_update_slice(node: Node) -> Factors:
    """The operand's axes pass: each shard chooses between its box and the update.

    Where the start is known, it reads only what of the update lies in its box.
    """
    shape, update = node.in_shapes[:2]
    axes = range(len(shape))
    written: list[Axis] = list(axes)
    shifted = []
    for k in axes:
        if update[k] != shape[k]:
            if (start := evaluated(node.ins[2 + k])) is None:
                written[k] = f"u{k}"
                shifted.append(k)
            else:
                # As JAX does it: the start moves, so that all elements exist.
                first = min(max(int(start), 0), shape[k] - update[k])
                written[k] = Windowed(k, Window(update[k], pad=first))
    rest: list[Any] = [[] for _ in axes]

    def emitter(local: Local) -> Sequence[Any]:
        operand, part, *starts = local.values
        if not part.size:
            return [operand]
        begins = [local.holes.get((1, k), (0,))[0] for k in axes]
        # The place in the update of each element of the box.
        inside: Any = True
        for k in shifted:
            start = jnp.clip(as_int32(starts[k]), 0, shape[k] - update[k])
            place = jnp.arange(operand.shape[k], dtype=jnp.int32) + local.starts[k]
            place = place - start
            here = (place >= 0) & (place < update[k])
            along = [1] * len(shape)
            along[k] = operand.shape[k]
            inside = inside & here.reshape(along)
            part = jnp.take(part, jnp.clip(place, 0, update[k] - 1), axis=k)
        if inside is not True:
            ends = [a + n for a, n in zip(begins, part.shape, strict=True)]
            part = jnp.where(inside, part, lax.slice(operand, begins, ends))
        return [lax.dynamic_update_slice(operand, part, begins)]

    return Factors(
        node,
        [axes, written, *rest],
        [axes],
        wholes={f"u{k}": WRITTEN for k in shifted},
        starts=shifted,
        emitter=emitter,
    )


REWRITES: dict[Any, Rewrite] = {p.dynamic_slice_p: dynamic_slice}
RULES: dict[Any, RuleMaker] = {p.dynamic_update_slice_p: dynamic_update_slice}
