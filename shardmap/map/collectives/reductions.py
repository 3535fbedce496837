"""Reductions over an axis whose elements are in blocks on devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.collectives import TABLE
from shardmap._jax.types import Aval, DType, Groups, Value
from shardmap.map.collectives.split_axis import SplitAxis


class Reduction(NamedTuple):
    """How elements combine.

    Attributes:
      local: over dimensions of one device's array.
      between: over mesh axes, as `jax.lax.psum`.
      segments: over groups of rows, as `jax.ops.segment_sum`.
      combine: of two arrays.
      identity: the value that changes nothing, for a dtype.
    """

    local: Callable[..., Any]
    between: Callable[..., Any]
    segments: Callable[..., Any]
    combine: Callable[[Any, Any], Any]
    identity: Callable[[Any], Any]

    def __call__(
        self,
        axis: SplitAxis,
        block: Value,
        *,
        axes: Sequence[Any],
        axis_index_groups: Groups | None = None,
    ) -> tuple[Any, bool]:
        """The rule of the collective."""
        present = axis.present(block, self.identity(block.dtype))
        if axis_index_groups is not None:
            groups, number, _ = axis.groups(axes, axis_index_groups)
            mine = jnp.asarray(number)[axis.positions(axes)]
            partial = self.segments(present, mine, len(groups))
            return self.finish(axis, partial, axes)[mine], True
        dimensions = tuple(a + 1 for a in axes if isinstance(a, int))
        return self.finish(axis, self.local(present, (0, *dimensions)), axes), False

    def start(self, aval: Aval) -> jax.Array:
        """What to accumulate parts of a block from."""
        return jnp.full(aval.shape, self.identity(aval.dtype), aval.dtype)

    def accumulate(self, before: Value, part: Value, present: Value) -> Any:
        """``before`` combined with the elements of a part that are ``present``."""
        shape = (-1,) + (1,) * (part.ndim - 1)
        fill = lax.full_like(part, self.identity(part.dtype))
        values = jnp.where(present.reshape(shape), part, fill)
        return self.combine(before, self.local(values, (0,)))

    def finish(self, axis: SplitAxis, value: Value, axes: Sequence[Any]) -> Any:
        """This device's value combined with those of the others."""
        others = tuple(n for n in axes if n != axis.name and not isinstance(n, int))
        names = (*axis.device_axes, *others)
        return self.between(value, names) if names else value


def add_up(block: Value, dimensions: Sequence[int]) -> Any:
    return jnp.sum(block, dimensions, dtype=block.dtype)


def _has_infinity(dtype: DType) -> bool:
    # The short floats that have none make it a NaN.
    return bool(np.isinf(np.array(np.inf).astype(dtype)))


def _lowest(dtype: DType) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if _has_infinity(dtype) else jnp.finfo(dtype).min
    return False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min


def _highest(dtype: DType) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf if _has_infinity(dtype) else jnp.finfo(dtype).max
    return True if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).max


def _max(block: Value, dimensions: Sequence[int]) -> Any:
    return jnp.max(
        block, dimensions, initial=np.array(_lowest(block.dtype), block.dtype)
    )


def _min(block: Value, dimensions: Sequence[int]) -> Any:
    return jnp.min(
        block, dimensions, initial=np.array(_highest(block.dtype), block.dtype)
    )


def _segment_max(block: Value, numbers: Value, count: int) -> Any:
    # `jax.ops.segment_max` starts from an infinity that not all floats have.
    start = jnp.full((count, *block.shape[1:]), _lowest(block.dtype), block.dtype)
    return start.at[numbers].max(block)


def _segment_min(block: Value, numbers: Value, count: int) -> Any:
    start = jnp.full((count, *block.shape[1:]), _highest(block.dtype), block.dtype)
    return start.at[numbers].min(block)


SUM = Reduction(add_up, lax.psum, jax.ops.segment_sum, jnp.add, lambda dtype: 0)


MAX = Reduction(_max, lax.pmax, _segment_max, jnp.maximum, _lowest)


MIN = Reduction(_min, lax.pmin, _segment_min, jnp.minimum, _highest)


_BY_COMBINER = {"sum": SUM, "max": MAX, "min": MIN}


REDUCTIONS: dict[Any, Reduction] = {
    each.primitive: _BY_COMBINER[each.combiner]
    for each in TABLE
    if each.is_reduction and each.combiner is not None
}
