"""Rules of ``dynamic_slice`` and ``dynamic_update_slice``: each shard does its part."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.arrays.combining import identity
from shardmap.planning.engine.factors import Factors, Local, out_size
from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.rules import Axis, Factor, Reason, RuleMaker, Windowed
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.indexed.known import evaluated
from shardmap.planning.lax.indexed.places import INDEXED, WRITTEN, as_int32, combiner_of


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
                    mode="fill",
                    fill_value=identity("add", value.dtype),
                    wrap_negative_indices=False,
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


RULES: dict[Any, RuleMaker] = {
    p.dynamic_slice_p: dynamic_slice,
    p.dynamic_update_slice_p: dynamic_update_slice,
}
