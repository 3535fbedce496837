"""Reductions over an axis whose elements are in blocks on devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardmap._jax.collectives import TABLE
from shardmap._jax.types import Aval, Groups, Value
from shardmap.arrays.combining import identity
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


def _extreme(
    combiner: str,
    reduce: Callable[..., Any],
    between: Callable[..., Any],
    combine: Callable[[Any, Any], Any],
) -> Reduction:
    """The reduction that keeps the largest or the smallest."""

    def local(block: Value, dimensions: Sequence[int]) -> Any:
        return reduce(block, dimensions, initial=identity(combiner, block.dtype))

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

    return Reduction(
        local=by_parts(local, jnp.expand_dims),
        between=by_parts(between, lambda real, names: real),
        segments=by_parts(segments, lambda real, numbers, count: real[numbers]),
        combine=combine,
        identity=functools.partial(identity, combiner),
    )


SUM = Reduction(
    add_up,
    lax.psum,
    jax.ops.segment_sum,
    jnp.add,
    functools.partial(identity, "add"),
)


MAX = _extreme("max", jnp.max, lax.pmax, jnp.maximum)


MIN = _extreme("min", jnp.min, lax.pmin, jnp.minimum)


_BY_COMBINER = {"sum": SUM, "max": MAX, "min": MIN}


REDUCTIONS: dict[Any, Reduction] = {
    each.primitive: _BY_COMBINER[each.combiner]
    for each in TABLE
    if each.is_reduction and each.combiner is not None
}
