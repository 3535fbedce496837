"""Reductions over an axis whose elements are in blocks on devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardmap._jax.collectives import axis_names
from shardmap._jax.types import Aval, Param, Value
from shardmap.arrays.combining import COMBINE, identity
from shardmap.map.primitives.axis import AxisLayout


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction over elements.

    Attributes:
      combiner: how two values become one, a name in `COMBINE`.
      local: reduces dimensions of an array, as `jax.numpy.sum`.
      between: reduces over mesh axes, as `jax.lax.psum`.
      segments: reduces groups of rows, as `jax.ops.segment_sum`.
    """

    combiner: str
    local: Callable[..., Any]
    between: Callable[..., Any]
    segments: Callable[..., Any]

    def __call__(
        self, axis: AxisLayout, block: Value, **params: Param
    ) -> tuple[Any, bool]:
        """The rule of the collective."""
        axes, axis_index_groups = axis_names(params), params.get("axis_index_groups")
        present = axis.present(block, identity(self.combiner, block.dtype))
        if axis_index_groups is not None:
            groups, number, _ = axis.groups(axes, axis_index_groups)
            mine = jnp.asarray(number)[axis.positions(axes)]
            partial = self.segments(present, mine, len(groups))
            return self.finish(axis, partial, axes)[mine], True
        dimensions = tuple(a + 1 for a in axes if isinstance(a, int))
        return self.finish(axis, self.local(present, (0, *dimensions)), axes), False

    def start(self, aval: Aval) -> jax.Array:
        """The value to which parts of a block are accumulated."""
        return jnp.full(aval.shape, identity(self.combiner, aval.dtype), aval.dtype)

    def accumulate(self, before: Value, part: Value, present: Value) -> Any:
        """``before`` combined with the elements of a part that are ``present``."""
        shape = (-1,) + (1,) * (part.ndim - 1)
        fill = lax.full_like(part, identity(self.combiner, part.dtype))
        values = jnp.where(present.reshape(shape), part, fill)
        return COMBINE[self.combiner](before, self.local(values, (0,)))

    def finish(self, axis: AxisLayout, value: Value, axes: Sequence[Any]) -> Any:
        """This device's value combined with those of the others."""
        others = tuple(n for n in axes if n != axis.name and not isinstance(n, int))
        names = (*axis.device_axes, *others)
        return self.between(value, names) if names else value


def _by_gathering(combiner: str) -> Reduction:
    """A reduction by any combiner: devices gather values, and combine them."""

    def local(block: Value, dimensions: Sequence[int]) -> Any:
        nothing = identity(combiner, block.dtype)
        return lax.reduce(block, nothing, COMBINE[combiner], dimensions)

    def between(value: Value, names: Sequence[Any]) -> Any:
        for name in names:
            value = local(lax.all_gather(value, name), (0,))
        return value

    def segments(block: Value, numbers: Value, count: int) -> Any:
        nothing = lax.full_like(block, identity(combiner, block.dtype))

        def segment(number: Value) -> Any:
            mine = jnp.expand_dims(numbers == number, range(1, block.ndim))
            return local(jnp.where(mine, block, nothing), (0,))

        return jax.vmap(segment)(jnp.arange(count, dtype=numbers.dtype))

    return Reduction(combiner, local, between, segments)


def add_up(block: Value, dimensions: Sequence[int]) -> Any:
    return jnp.sum(block, dimensions, dtype=block.dtype)


def _extreme(combiner: str, between: Callable[..., Any]) -> Reduction:
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

    return Reduction(
        combiner,
        by_parts(_by_gathering(combiner).local, jnp.expand_dims),
        by_parts(between, lambda real, names: real),
        by_parts(segments, lambda real, numbers, count: real[numbers]),
    )


SUM = Reduction("add", add_up, lax.psum, jax.ops.segment_sum)

REDUCTIONS: dict[str, Reduction] = {
    **{combiner: _by_gathering(combiner) for combiner in COMBINE},
    "add": SUM,
    "max": _extreme("max", lax.pmax),
    "min": _extreme("min", lax.pmin),
}
"""By combiner."""
