"""The rule of each collective for blocks of elements on devices.

A device first combines the elements of its block. Then there is one collective between
devices, of the least size. See `AxisLayout` for where the elements are.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.primitives import axis_names, with_axis_names
from shardmap._jax.types import Aval, DType, Groups, Param, Primitive, Value
from shardmap.arrays.combining import COMBINE, identity
from shardmap.map.primitives.axis import AxisLayout, axis_text, pad_last

Rule = Callable[..., tuple[Any, bool]]
"""Takes the axis, the blocks of operands with elements in front, and the equation's
parameters. Returns the result, or a list of them, and whether these differ between
elements, which are then in front again."""


# Reductions


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction over elements.

    Attributes:
      combiner: how two values become one, a name in `COMBINE`.
      within_block: reduces dimensions of an array, as `jax.numpy.sum`.
      across_devices: reduces over mesh axes, as `jax.lax.psum`.
      segments: reduces groups of rows, as `jax.ops.segment_sum`.
    """

    combiner: str
    within_block: Callable[..., Any]
    across_devices: Callable[..., Any]
    segments: Callable[..., Any]

    def __call__(
        self, axis: AxisLayout, block: Value, **params: Param
    ) -> tuple[Any, bool]:
        """The rule of the collective."""
        axes, axis_index_groups = axis_names(params), params.get("axis_index_groups")
        dtype = block.dtype
        block = block.astype(self._accumulated_in(dtype))
        present = axis.mask_padding(block, identity(self.combiner, block.dtype))
        if axis_index_groups is not None:
            groups, number, _ = axis.groups(axes, axis_index_groups)
            mine = jnp.asarray(number)[axis.positions(axes)]
            partial = self.segments(present, mine, len(groups)).astype(dtype)
            return self.finish(axis, partial, axes)[mine], True
        dimensions = tuple(a + 1 for a in axes if isinstance(a, int))
        partial = self.within_block(present, (0, *dimensions)).astype(dtype)
        return self.finish(axis, partial, axes), False

    def start(self, aval: Aval) -> jax.Array:
        """The value to which parts of a block are accumulated."""
        dtype = self._accumulated_in(aval.dtype)
        return jnp.full(aval.shape, identity(self.combiner, dtype), dtype)

    def accumulate(self, before: Value, part: Value, present: Value) -> Any:
        """``before`` combined with the elements of a part that are ``present``."""
        shape = (-1,) + (1,) * (part.ndim - 1)
        part = part.astype(before.dtype)
        fill = lax.full_like(part, identity(self.combiner, part.dtype))
        values = jnp.where(present.reshape(shape), part, fill)
        return COMBINE[self.combiner](before, self.within_block(values, (0,)))

    def _accumulated_in(self, dtype: DType) -> DType:
        """The dtype in which many values are combined, to be rounded once."""
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if self.combiner in ("add", "mul") and is_float and jnp.finfo(dtype).bits < 32:
            return np.dtype(np.float32)
        return dtype

    def finish(self, axis: AxisLayout, value: Value, axes: Sequence[Any]) -> Any:
        """This device's value combined with those of the others."""
        others = tuple(n for n in axes if n != axis.name and not isinstance(n, int))
        names = (*axis.device_axes, *others)
        return self.across_devices(value, names) if names else value


def _by_gathering(combiner: str) -> Reduction:
    """A reduction by any combiner: devices gather values, and combine them."""

    def within_block(block: Value, dimensions: Sequence[int]) -> Any:
        nothing = identity(combiner, block.dtype)
        return lax.reduce(block, nothing, COMBINE[combiner], dimensions)

    def across_devices(value: Value, names: Sequence[Any]) -> Any:
        for name in names:
            value = within_block(lax.all_gather(value, name), (0,))
        return value

    def segments(block: Value, numbers: Value, count: int) -> Any:
        nothing = lax.full_like(block, identity(combiner, block.dtype))

        def segment(number: Value) -> Any:
            mine = jnp.expand_dims(numbers == number, range(1, block.ndim))
            return within_block(jnp.where(mine, block, nothing), (0,))

        return jax.vmap(segment)(jnp.arange(count, dtype=numbers.dtype))

    return Reduction(combiner, within_block, across_devices, segments)


def add_up(block: Value, dimensions: Sequence[int]) -> Any:
    return jnp.sum(block, dimensions, dtype=block.dtype)


def _with_nan(combiner: str, reduced: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction that gives NaN if there is one.

    XLA's all-reduce on CPU loses it, and sometimes the number beside it. There the
    bits of floats are compared as integers, of which NaN is the extreme.
    """

    def on_cpu(value: Value, *where: Any) -> Any:
        dtype = np.promote_types(value.dtype, np.float32)  # Of 32 or 64 bits.
        bits = np.iinfo(np.int32 if dtype == np.float32 else np.int64)
        nan = np.array(bits.max if combiner == "max" else bits.min, bits.dtype)

        def in_order(signed: Value) -> Any:
            # Of negative floats, those with the larger bits are smaller.
            flipped = signed ^ np.array(bits.max, bits.dtype)
            return jnp.where(signed < 0, flipped, signed)

        def place(floats: Value) -> Any:
            return in_order(lax.bitcast_convert_type(floats, bits.dtype))

        places = jnp.where(jnp.isnan(value), nan, place(value.astype(dtype)))
        # A reduction of nothing is an infinity, not the least integer.
        least = identity(combiner, value.dtype).astype(dtype)
        result = COMBINE[combiner](reduced(places, *where), place(jnp.array(least)))
        floats = lax.bitcast_convert_type(in_order(result), dtype)
        return jnp.where(result == nan, jnp.nan, floats).astype(value.dtype)

    def by_platform(value: Value, *where: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return reduced(value, *where)
        return lax.platform_dependent(
            value,
            cpu=lambda value: on_cpu(value, *where),
            default=lambda value: reduced(value, *where),
        )

    return by_platform


def _extreme(combiner: str, across_devices: Callable[..., Any]) -> Reduction:
    """The reduction that keeps the largest or the smallest."""

    def segments(block: Value, numbers: Value, count: int) -> Any:
        # `jax.ops.segment_max` starts from an infinity that not all floats have.
        nothing = identity(combiner, block.dtype)
        start = jnp.full((count, *block.shape[1:]), nothing, block.dtype)
        return getattr(start.at[numbers], combiner)(block)

    def by_parts(one: Callable[..., Any], spread: Callable[..., Any]) -> Any:
        # XLA compares no complex numbers between devices. The order of JAX's is that
        # of the real parts, and of the imaginary ones where these are equal.
        def reduced(value: Value, *where: Any) -> Any:
            if not jnp.issubdtype(value.dtype, jnp.complexfloating):
                return one(value, *where)
            real = one(value.real, *where)
            tied = (value.real == spread(real, *where)) | jnp.isnan(value.real)
            nothing = lax.full_like(value.imag, identity(combiner, value.real.dtype))
            return lax.complex(real, one(jnp.where(tied, value.imag, nothing), *where))

        return reduced

    within_block = _by_gathering(combiner).within_block
    return Reduction(
        combiner,
        by_parts(_with_nan(combiner, within_block), jnp.expand_dims),
        by_parts(_with_nan(combiner, across_devices), lambda real, names: real),
        by_parts(
            _with_nan(combiner, segments), lambda real, numbers, count: real[numbers]
        ),
    )


SUM = Reduction("add", add_up, lax.psum, jax.ops.segment_sum)

REDUCTIONS: dict[str, Reduction] = {
    **{combiner: _by_gathering(combiner) for combiner in COMBINE},
    "add": SUM,
    "max": _extreme("max", lax.pmax),
    "min": _extreme("min", lax.pmin),
}
"""By combiner."""


def reduce_scatter_rule(
    axis: AxisLayout,
    block: Value,
    *,
    axis_name: Sequence[Any],
    scatter_dimension: int,
    axis_index_groups: Groups | None,
    tiled: bool,
    axis_size: int,
) -> tuple[Any, bool]:
    # Pieces in front: each element of a group gets one.
    shape = list(block.shape)
    dimension = scatter_dimension + 1
    pieces = [axis_size, shape[dimension] // axis_size] if tiled else [axis_size]
    block = block.reshape(*shape[:dimension], *pieces, *shape[dimension + 1 :])
    block = jnp.moveaxis(block, dimension, 1)
    if axis_name == (axis.name,) and axis_index_groups is None:
        total = add_up(axis.mask_padding(block, 0), (0,))
        total = pad_last(total, axis.padding, 0)
        if axis.device_axes:
            total = lax.psum_scatter(total, axis.device_axes, tiled=True)
        return total, True
    _, _, place = axis.groups(axis_name, axis_index_groups)
    mine = jnp.asarray(place)[axis.positions(axis_name)]
    total, differs = SUM(
        axis, block, axes=tuple(axis_name), axis_index_groups=axis_index_groups
    )
    if not differs:
        return total[mine], True
    return jax.vmap(lambda pieces, k: pieces[k])(total, mine), True


# Rearrangements


def _merge(array: Value, dimension: int) -> Any:
    """Two neighbouring dimensions as one."""
    shape = array.shape
    merged = shape[dimension] * shape[dimension + 1]
    return array.reshape(*shape[:dimension], merged, *shape[dimension + 2 :])


def all_gather_rule(
    axis: AxisLayout,
    block: Value,
    *,
    axis_name: Sequence[Any],
    all_gather_dimension: int,
    axis_index_groups: Groups | None,
    tiled: bool,
    axis_size: int,
) -> tuple[Any, bool]:
    everything = axis.gather(block, axis_name)
    dimension, differs = all_gather_dimension, axis_index_groups is not None
    if differs:
        groups, number, _ = axis.groups(axis_name, axis_index_groups)
        members = np.asarray(groups, np.int32)[number]
        mine = jnp.asarray(members)[axis.positions(axis_name)]
        everything, dimension = everything[mine], dimension + 1
    result = jnp.moveaxis(everything, int(differs), dimension)
    return (_merge(result, dimension) if tiled else result), differs


def all_to_all_rule(
    axis: AxisLayout,
    block: Value,
    *,
    axis_name: Hashable,
    split_axis: int,
    concat_axis: int,
    axis_index_groups: Groups | None,
    tiled: bool,
) -> tuple[Any, bool]:
    names = axis_names({"axis_name": axis_name})
    groups, number, place = axis.groups(names, axis_index_groups)
    count = len(groups[0])
    # The pieces for each element in front: (own elements, pieces, ...).
    shape = list(block.shape)
    cut = [count, shape[split_axis + 1] // count]
    block = block.reshape(*shape[: split_axis + 1], *cut, *shape[split_axis + 2 :])
    block = jnp.moveaxis(block, split_axis + 1, 1)
    if names == (axis.name,) and axis_index_groups is None:
        block = pad_last(block, axis.padding, 1)
        if axis.device_axes:
            block = lax.all_to_all(
                block, axis.device_axes, split_axis=1, concat_axis=0, tiled=True
            )
        received = jnp.moveaxis(block[: axis.size], 1, 0)
    else:
        everything = axis.gather(block, names)
        members = np.asarray(groups, np.int32)[number]
        mine = axis.positions(names)
        received = jax.vmap(lambda group, k: everything[group, k])(
            jnp.asarray(members)[mine], jnp.asarray(place)[mine]
        )
    # (own elements, sources, ...): sources one after another along concat_axis.
    result = jnp.moveaxis(received, 1, concat_axis + 1)
    return _merge(result, concat_axis + 1), True


Pairs = Sequence[tuple[int, int]]


def _permute(x: Value, names: Sequence[str], pairs: Pairs) -> Any:
    """`jax.lax.ppermute` over mesh axes, the first one of ``names`` the major one."""
    order = jax.sharding.get_abstract_mesh().axis_names
    if set(names) <= set(order):
        sizes = [lax.axis_size(name) for name in names]
        names, pairs = permutation_in_order(names, sizes, pairs, order)
    return lax.ppermute(x, tuple(names), pairs)


def permutation_in_order(
    names: Sequence[str], sizes: Sequence[int], pairs: Pairs, order: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The same permutation with its axes in another order."""
    ordered = sorted(range(len(names)), key=lambda k: order.index(names[k]))
    numbers = np.empty(math.prod(sizes), np.int64)
    numbers[np.arange(numbers.size).reshape(sizes).transpose(ordered).ravel()] = (
        np.arange(numbers.size)
    )
    return tuple(names[k] for k in ordered), tuple(
        (int(numbers[start]), int(numbers[end])) for start, end in pairs
    )


def ppermute_rule(
    axis: AxisLayout, block: Value, *, axis_name: Sequence[Any], perm: Any
) -> tuple[Any, bool]:
    names = axis_names({"axis_name": axis_name})
    if names != (axis.name,):
        source = np.full(axis.total(names), -1, np.int32)
        for start, end in perm:
            source[end] = start
        mine = jnp.asarray(source)[axis.positions(names)]
        moved = axis.gather(block, names)[mine]
        arrived = jnp.expand_dims(mine >= 0, range(1, moved.ndim))
        return jnp.where(arrived, moved, jnp.zeros((), moved.dtype)), True

    # One round for each distance between devices: pack, send, unpack.
    rounds: dict[int, list[list[tuple[int, int]]]] = {}
    for start, end in perm:
        device, target = start // axis.block, end // axis.block
        sent = rounds.setdefault(
            (target - device) % axis.devices, [[] for _ in range(axis.devices)]
        )
        sent[device].append((start % axis.block, end % axis.block))
    here = lax.axis_index(axis.device_axes) if axis.device_axes else 0
    # One place more, for what is not for this device: XLA's CPU compiler of JAX 0.10
    # takes a wrong element where an index is out of range.
    result = pad_last(jnp.zeros_like(block), 1, 0)
    for distance, sent in sorted(rounds.items()):
        width = max(map(len, sent))
        packed_from = np.zeros((axis.devices, width), np.int32)
        unpacked_to = np.full((axis.devices, width), axis.block, np.int32)
        for device, moves in enumerate(sent):
            target = (device + distance) % axis.devices
            for k, (start, end) in enumerate(moves):
                packed_from[device, k], unpacked_to[target, k] = start, end
        packed = block[jnp.asarray(packed_from)[here]]
        if distance:
            pairs = [
                (device, (device + distance) % axis.devices)
                for device, moves in enumerate(sent)
                if moves
            ]
            packed = _permute(packed, axis.device_axes, pairs)
        result = result.at[jnp.asarray(unpacked_to)[here]].set(packed)
    return result[: axis.block], True


def pbroadcast_rule(
    axis: AxisLayout, block: Value, *, axis_name: Hashable, source: int
) -> tuple[Any, bool]:
    names = axis_names({"axis_name": axis_name})
    if not jnp.issubdtype(block.dtype, np.number):
        return axis.gather(block, names)[source], False
    if jnp.issubdtype(block.dtype, jnp.complexfloating):
        parts = jnp.stack([block.real, block.imag], 1)
        (real, imag), _ = pbroadcast_rule(
            axis, parts, axis_name=axis_name, source=source
        )
        return lax.complex(real, imag), False
    dtype = bits = block.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        # XLA's sum between CPU devices loses the sign of -0.0.
        bits = np.dtype(f"uint{jnp.finfo(dtype).bits}")
        block = lax.bitcast_convert_type(block, bits)
    chosen = jnp.expand_dims(axis.positions(names) == source, range(1, block.ndim))
    only = jnp.where(chosen, block, jnp.zeros((), bits))
    total, differs = SUM(axis, only, axes=names)
    if bits != dtype:
        total = lax.bitcast_convert_type(total, dtype)
    return total, differs


def axis_index_rule(axis: AxisLayout, *, axis_name: Hashable) -> tuple[Any, bool]:
    return axis.indices(), True


def ragged_all_to_all_rule(
    axis: AxisLayout, *_: object, **__: object
) -> tuple[Any, bool]:
    raise NotImplementedError(
        f"ragged_all_to_all over {axis_text(axis.name)}: its {axis.size} elements lie "
        f"{axis.block} on each of {axis.devices} devices, and ragged_all_to_all works "
        "for one element on each device only. Use all_to_all, or more devices."
    )


# Others


def rule_of_vmap(primitive: Primitive) -> Rule:
    """The rule of a collective with a batching rule: each device does all elements."""

    def rule(axis: AxisLayout, *blocks: Value, **params: Param) -> tuple[Any, bool]:
        names = axis_names(params)
        vectorized = with_axis_names(params, (axis.vectorized_name,))
        results = jax.vmap(
            lambda *operands: primitive.bind(*operands, **vectorized),
            axis_name=axis.vectorized_name,
        )(*(axis.gather(block, names) for block in blocks))
        mine = axis.positions(names)
        return jax.tree.map(lambda result: result[mine], results), True

    return rule
