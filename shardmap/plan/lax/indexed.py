"""Rules of the primitives that take the place of elements from other operands."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import SCATTER_SUB
from shardmap.plan.engine.combiners import identity
from shardmap.plan.engine.factors import Factors, Local, bind, out_size
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.rules import Axis, Factor, Reason, RuleMaker

INDEXED = Reason(
    "which elements are taken is known only when it runs",
    "cut the indices, or an axis that is not indexed",
)
WRITTEN = Reason(
    "where the updates go is known only when it runs", "cut the operand instead"
)


def as_int32(index: Any) -> Any:
    """Indices of any integer type, those far outside still far outside."""
    index = jnp.asarray(index)
    limits = np.iinfo(np.int32)
    if index.dtype.itemsize > 4:
        index = jnp.clip(index, limits.min, limits.max)
    elif index.dtype == jnp.uint32:
        index = jnp.minimum(index, limits.max)
    return index.astype(jnp.int32)


def combiner_of(node: Node) -> str | None:
    """How parts combine that are zero but for what they took; None: not at all."""
    dtype = node.outs[0].aval.dtype
    if is_key(node.outs[0].aval) or max(node.in_shapes[0], default=0) >= 2**31:
        return None
    return "or" if dtype == jnp.bool_ else "add"


def fill_value(node: Node) -> Any:
    """What a gather gives for places outside of its operand."""
    dtype = node.outs[0].aval.dtype
    given = node.params["fill_value"]
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if dtype == jnp.bool_:
        return True
    limits = jnp.iinfo(dtype)
    return limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max


def gather(node: Node) -> Factors:
    """Axes taken in full and the axes of the indices pass.

    An axis of which single places are taken gives parts: each shard takes what it has,
    and zero for the rest.
    """
    numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
    operand_shape, indices_shape = node.in_shapes
    operand: list[Axis] = [None] * len(operand_shape)
    indices: list[Axis] = [f"i{k}" for k in range(len(indices_shape))]
    out: list[Factor] = [None] * len(node.out_shapes[0])
    wholes: dict[Factor, Reason] = {indices[-1]: INDEXED}
    batch_axes = [k for k in range(len(out)) if k not in numbers.offset_dims]
    for axis, factor in zip(batch_axes, indices[:-1], strict=True):
        out[axis] = factor
    pairs = zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    )
    for axis, index_axis in pairs:
        operand[axis] = indices[index_axis]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [axis for axis in range(len(operand)) if axis not in gone]
    single = list(numbers.collapsed_slice_dims)
    for axis, place in zip(windows, numbers.offset_dims, strict=True):
        operand[axis] = f"o{axis}"
        out[place] = f"o{axis}"
        if sizes[axis] == 1 != operand_shape[axis]:
            out[place] = None
            single.append(axis)
        elif sizes[axis] != operand_shape[axis]:
            out[place] = f"w{axis}"
            wholes |= {f"o{axis}": INDEXED, f"w{axis}": INDEXED}
    combiner = combiner_of(node)
    for axis in single:
        operand[axis] = f"o{axis}"
        if combiner is None:
            wholes[f"o{axis}"] = INDEXED
    contracted: dict[Factor, str] = {}
    if combiner:
        contracted = {f"o{axis}": combiner for axis in single}
    filled = node.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP

    def emitter(local: Local) -> Sequence[Any]:
        taken = list(sizes)
        for axis in windows:
            if axis not in single and f"o{axis}" not in wholes:
                taken[axis] = local.sizes[f"o{axis}"]
        params = {**node.params, "slice_sizes": tuple(taken)}
        cut = [k for k in single if local.sizes[f"o{k}"] != operand_shape[k]]
        if not cut:
            return bind(node, local.values, params)
        value, index = local.values[0], as_int32(local.values[1])
        inside: Any = True
        here: Any = True
        first: Any = True
        columns = []
        for axis in cut:
            first = first & (local.starts[f"o{axis}"] == 0)
            if axis not in numbers.start_index_map:
                here = here & first
        for k, axis in enumerate(numbers.start_index_map):
            last = operand_shape[axis] - sizes[axis]
            column = index[..., k]
            inside = inside & (column >= 0) & (column <= last)
            column = jnp.clip(column, 0, last)
            if axis in cut:
                column = column - local.starts[f"o{axis}"]
                size = local.sizes[f"o{axis}"]
                here = here & (column >= 0) & (column < size)
                column = jnp.clip(column, 0, size - 1)
            columns.append(column)
        if columns:
            index = jnp.stack(columns, -1)
        params["mode"] = lax.GatherScatterMode.CLIP
        params["indices_are_sorted"] = False
        params["unique_indices"] = False
        [result] = bind(node, [value, index], params)

        def spread(mask: Any) -> Any:
            mask = jnp.broadcast_to(mask, index.shape[:-1])
            return lax.broadcast_in_dim(mask, result.shape, batch_axes)

        zero = jnp.zeros_like(result)
        if not filled:
            return [jnp.where(spread(here), result, zero)]
        outside = spread(jnp.logical_not(inside) & first)
        fill = jnp.full_like(result, fill_value(node))
        result = jnp.where(spread(here & inside), result, zero)
        return [jnp.where(outside, fill, result)]

    def passes(combiner: str, pending: frozenset[int]) -> str | None:
        return combiner if pending == {0} and not filled else None

    return Factors(
        node,
        [operand, indices],
        [out],
        contracted=contracted,
        wholes=wholes,
        starts=list(contracted),
        emitter=emitter,
        commutes=passes,
    )


def scatter(node: Node) -> Factors:
    """The operand's axes pass: each shard drops the updates that go elsewhere.

    Updates that combine give parts, of which one has the operand.
    """
    numbers = node.params["dimension_numbers"]
    shape, indices_shape, updates_shape = node.in_shapes
    operand: list[Factor] = list(range(len(shape)))
    indices: list[Axis] = [f"i{k}" for k in range(len(indices_shape))]
    updates: list[Axis] = [None] * len(updates_shape)
    wholes: dict[Factor, Reason] = {indices[-1]: WRITTEN}
    combiner = COMBINERS.get(node.primitive)
    contracted: dict[Factor, str] = {}
    if combiner:
        contracted = dict.fromkeys(indices[:-1], combiner)
    else:
        wholes |= dict.fromkeys(indices, WRITTEN)
    batch_axes = [k for k in range(len(updates)) if k not in numbers.update_window_dims]
    for place, factor in zip(batch_axes, indices[:-1], strict=True):
        updates[place] = factor
    pairs = zip(
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        strict=True,
    )
    for axis, index_axis in pairs:
        old, new = indices[index_axis], operand[axis]
        wholes.pop(old, None)
        contracted.pop(old, None)
        indices[index_axis] = new
        updates = [new if factor == old else factor for factor in updates]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [axis for axis in range(len(shape)) if axis not in gone]
    for axis, place in zip(windows, numbers.update_window_dims, strict=True):
        updates[place] = axis
        if updates_shape[place] != shape[axis]:
            updates[place] = f"u{axis}"
            wholes |= {f"u{axis}": WRITTEN, axis: WRITTEN}
    shifted = [
        axis
        for axis in numbers.inserted_window_dims
        if axis in numbers.scatter_dims_to_operand_dims
    ]

    def emitter(local: Local) -> Sequence[Any]:
        values = list(local.values)
        params = dict(node.params)
        first: Any = True
        for factor in contracted:
            if local.sizes[factor] != indices_shape[indices.index(factor)]:
                first = first & (local.starts[factor] == 0)
        if combiner and first is not True:
            nothing = identity(combiner, values[0].dtype)
            values[0] = jnp.where(first, values[0], nothing)
        if any(local.sizes[axis] != shape[axis] for axis in shifted):
            moved = as_int32(values[1])
            columns = []
            for k, axis in enumerate(numbers.scatter_dims_to_operand_dims):
                column = moved[..., k]
                if axis in shifted:
                    if params["mode"] == lax.GatherScatterMode.CLIP:
                        column = jnp.clip(column, 0, shape[axis] - 1)
                    column = column - local.starts[axis]
                elif params["mode"] == lax.GatherScatterMode.CLIP:
                    place = numbers.update_window_dims[windows.index(axis)]
                    column = jnp.clip(column, 0, shape[axis] - updates_shape[place])
                columns.append(column)
            values[1] = jnp.stack(columns, -1)
            params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
            params["indices_are_sorted"] = False
        return bind(node, values, params)

    return Factors(
        node,
        [operand, indices, updates],
        [operand],
        contracted=contracted,
        wholes=wholes,
        starts=[*shifted, *contracted],
        emitter=emitter,
        cheap=False,
    )


def dynamic_slice(node: Node) -> Factors:
    """Axes taken in full pass; of others each shard gives the part that it has."""
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
        here: Any = True
        for k in cut:
            first = jnp.clip(as_int32(starts[k]), 0, shape[k] - taken[k])
            begins[k] = first + local.starts[k]
            length = local.sizes[f"o{k}"]
            if length != shape[k]:
                places = begins[k] + jnp.arange(local.sizes[k], dtype=jnp.int32)
                places = places - local.starts[f"o{k}"]
                begins[k] = jnp.int32(0)
                along = [1] * len(shape)
                along[k] = local.sizes[k]
                here = here & ((places >= 0) & (places < length)).reshape(along)
                places = jnp.clip(places, 0, length - 1)
                value = jnp.take(value, places, axis=k, mode="clip")
        sizes = out_size(local, range(len(shape)))
        result = lax.dynamic_slice(value, begins, sizes)
        if here is not True:
            result = jnp.where(here, result, jnp.zeros_like(result))
        return [result]

    return Factors(
        node,
        [operand, *rest],
        [range(len(shape))],
        contracted=contracted,
        wholes=wholes,
        starts=[*cut, *contracted],
        emitter=emitter,
        commutes=lambda combiner, pending: combiner if pending == {0} else None,
    )


def dynamic_update_slice(node: Node) -> Factors:
    shape, update = node.in_shapes[:2]
    same = [a == b for a, b in zip(shape, update, strict=True)]
    axes = range(len(shape))
    written = [k if same[k] else f"u{k}" for k in axes]
    wholes: dict[Factor, Reason] = {f"u{k}": WRITTEN for k in axes if not same[k]}
    rest: list[Any] = [[] for _ in node.ins[2:]]
    shifted = [k for k in axes if not same[k]]

    def emitter(local: Local) -> Sequence[Any]:
        operand, part, *starts = local.values
        # The place in the update of each element of the operand's box.
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


COMBINERS = {
    p.scatter_add_p: "add",
    p.scatter_max_p: "max",
    p.scatter_min_p: "min",
    p.scatter_mul_p: "mul",
    SCATTER_SUB: "add",
}

RULES: dict[Any, RuleMaker] = {
    p.dynamic_slice_p: dynamic_slice,
    p.dynamic_update_slice_p: dynamic_update_slice,
    p.gather_p: gather,
    **dict.fromkeys([p.scatter_p, *COMBINERS], scatter),
}
