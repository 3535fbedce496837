"""Rules of ``dynamic_slice`` and ``dynamic_update_slice``: each shard does its part."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors, Local, out_size
from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.rules import Factor, Reason, RuleMaker
from shardmap.plan.lax.indexed.places import INDEXED, WRITTEN, as_int32, combiner_of


def dynamic_slice(node: Node) -> Factors:
    """Axes taken in full pass; along others each shard gives the elements it has."""
    shape, [taken] = node.in_shapes[0], node.out_shapes
    same = [a == b for a, b in zip(shape, taken, strict=True)]
    operand = [k if same[k] else f"o{k}" for k in range(len(shape))]
    cut = [k for k in range(len(shape)) if not same[k]]
    combiner = combiner_of(node)
    wholes: dict[Factor, Reason] = {}
    contracted: dict[Factor, str] = {}
    if combiner:
        contracted = {f"o{k}": combiner for k in cut}
    else:
        wholes = {f"o{k}": INDEXED for k in cut}
    rest: list[Any] = [[] for _ in node.ins[1:]]

    def emitter(local: Local) -> Sequence[Any]:
        value, *starts = local.values
        begins: list[Any] = [jnp.int32(0)] * len(shape)
        for k in cut:
            # As JAX does it: the start moves, so that all elements exist.
            first = jnp.clip(as_int32(starts[k]), 0, shape[k] - taken[k])
            begins[k] = first + local.starts[k]
            if local.sizes[f"o{k}"] != shape[k]:
                # The axis is cut: elements outside of this box are zero.
                places = begins[k] + jnp.arange(local.sizes[k], dtype=jnp.int32)
                at = (*[slice(None)] * k, places - local.starts[f"o{k}"])
                value = value.at[at].get(
                    mode="fill", fill_value=0, wrap_negative_indices=False
                )
                begins[k] = jnp.int32(0)
        sizes = out_size(local, range(len(shape)))
        return [lax.dynamic_slice(value, begins, sizes)]

    return Factors(
        node,
        [operand, *rest],
        [range(len(shape))],
        contracted=contracted,
        wholes=wholes,
        starts=[*cut, *contracted],
        emitter=emitter,
        passes=lambda combiner, pending: combiner if pending == {0} else None,
    )


def dynamic_update_slice(node: Node) -> Factors:
    """The operand's axes pass: each shard chooses between its box and the update."""
    shape, update = node.in_shapes[:2]
    same = [a == b for a, b in zip(shape, update, strict=True)]
    axes = range(len(shape))
    written = [k if same[k] else f"u{k}" for k in axes]
    wholes: dict[Factor, Reason] = {f"u{k}": WRITTEN for k in axes if not same[k]}
    rest: list[Any] = [[] for _ in node.ins[2:]]
    shifted = [k for k in axes if not same[k]]

    def emitter(local: Local) -> Sequence[Any]:
        operand, part, *starts = local.values
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
            if not update[k]:
                return [operand]
            part = jnp.take(part, jnp.clip(place, 0, update[k] - 1), axis=k)
        if inside is True:
            return [jnp.broadcast_to(part, operand.shape)]
        return [jnp.where(inside, part, operand)]

    return Factors(
        node,
        [axes, written, *rest],
        [axes],
        wholes=wholes,
        starts=shifted,
        emitter=emitter,
    )


RULES: dict[Any, RuleMaker] = {
    p.dynamic_slice_p: dynamic_slice,
    p.dynamic_update_slice_p: dynamic_update_slice,
}
