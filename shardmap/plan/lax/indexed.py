"""Rules of the primitives that take the place of elements from other operands."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.lax.shape import out_size
from shardmap.plan.program import Node
from shardmap.plan.rules import Axis, Factor, Factors, Local, Reason, RuleMaker, bind

INDEXED = Reason(
    "which elements are taken is known only when it runs",
    "cut the indices, or an axis that is not indexed",
)
WRITTEN = Reason(
    "where the updates go is known only when it runs", "cut the operand instead"
)


def gather(node: Node) -> Factors:
    """Axes taken in full and the axes of the indices pass."""
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
    for axis in numbers.collapsed_slice_dims:
        operand[axis] = f"o{axis}"
        wholes[f"o{axis}"] = INDEXED
    for axis, place in zip(windows, numbers.offset_dims, strict=True):
        operand[axis] = f"o{axis}"
        out[place] = f"o{axis}"
        if sizes[axis] != operand_shape[axis]:
            out[place] = f"w{axis}"
            wholes |= {f"o{axis}": INDEXED, f"w{axis}": INDEXED}

    def emitter(local: Local) -> Sequence[Any]:
        taken = list(sizes)
        for axis in windows:
            if f"o{axis}" not in wholes:
                taken[axis] = local.sizes[f"o{axis}"]
        return bind(node, local.values, {**node.params, "slice_sizes": tuple(taken)})

    def passes(combiner: str, pending: frozenset[int]) -> str | None:
        filled = node.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
        return combiner if pending == {0} and not filled else None

    return Factors(
        node,
        [operand, indices],
        [out],
        wholes=wholes,
        emitter=emitter,
        passes=passes,
    )


def scatter(node: Node) -> Factors:
    """The operand's axes pass: each shard drops the updates that go elsewhere."""
    numbers = node.params["dimension_numbers"]
    shape, indices_shape, updates_shape = node.in_shapes
    operand: list[Factor] = list(range(len(shape)))
    indices: list[Axis] = [f"i{k}" for k in range(len(indices_shape))]
    updates: list[Axis] = [None] * len(updates_shape)
    wholes: dict[Factor, Reason] = dict.fromkeys(indices, WRITTEN)
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
        del wholes[old]
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
        if any(local.sizes[axis] != shape[axis] for axis in shifted):
            moved = values[1].astype(jnp.int32)
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
        wholes=wholes,
        starts=shifted,
        emitter=emitter,
        cheap=False,
    )


def dynamic_slice(node: Node) -> Factors:
    shape, [taken] = node.in_shapes[0], node.out_shapes
    same = [a == b for a, b in zip(shape, taken, strict=True)]
    operand = [k if same[k] else f"o{k}" for k in range(len(shape))]
    wholes: dict[Factor, Reason] = {
        f"o{k}": INDEXED for k in range(len(shape)) if not same[k]
    }
    rest: list[Any] = [[] for _ in node.ins[1:]]
    cut = [k for k in range(len(shape)) if not same[k]]

    def emitter(local: Local) -> Sequence[Any]:
        value, *starts = local.values
        begins: list[Any] = [0] * len(shape)
        for k in cut:
            start = jnp.asarray(starts[k])
            first = jnp.clip(start, 0, shape[k] - taken[k]).astype(jnp.int32)
            begins[k] = first + local.starts[k]
        return [lax.dynamic_slice(value, begins, out_size(local, range(len(shape))))]

    return Factors(
        node,
        [operand, *rest],
        [range(len(shape))],
        wholes=wholes,
        starts=cut,
        emitter=emitter,
        passes=lambda combiner, pending: combiner if pending == {0} else None,
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
            start = jnp.clip(jnp.asarray(starts[k]), 0, shape[k] - update[k])
            place = jnp.arange(operand.shape[k], dtype=jnp.int32) + local.starts[k]
            place = place - start.astype(jnp.int32)
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


def _scatter_sub_p() -> Any:
    """Has no public name."""
    x = np.zeros(2, np.float32)
    jaxpr = jax.make_jaxpr(lambda x: jnp.asarray(x).at[np.array([0])].subtract(1.0))(x)
    return jaxpr.eqns[-1].primitive


SCATTERS = [
    *(p.scatter_p, p.scatter_add_p, p.scatter_max_p, p.scatter_min_p, p.scatter_mul_p),
    _scatter_sub_p(),
]

RULES: dict[Any, RuleMaker] = {
    p.dynamic_slice_p: dynamic_slice,
    p.dynamic_update_slice_p: dynamic_update_slice,
    p.gather_p: gather,
    **dict.fromkeys(SCATTERS, scatter),
}
