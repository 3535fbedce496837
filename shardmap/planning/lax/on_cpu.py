"""What shards compute in another way than XLA where XLA for CPU is slow.

Each of these is asked where its equation is emitted, and looks at no more than that
equation. On other backends they do nothing.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.stages import SLOW_LEADING_SUMS
from shardmap.planning.engine.nodes import Node

LONG_ROW = 2**15
"""The fewest elements of a long row. XLA is fast at shorter ones."""

FOLDED = 8
"""How many parts of an axis are added at a time."""

MANY_FEATURES = 16
"""A convolution of so many pairs of features in a group is faster with these last."""

COMBINE: Mapping[Any, Callable[[Any, Any], Any]] = {
    p.reduce_sum_p: lax.add,
    p.reduce_max_p: lax.max,
    p.reduce_min_p: lax.min,
}


def reduction_of(node: Node, x: Any) -> Any:
    """The operand of a reduction, perhaps with its leading axes reduced to size 1.

    Before JAX 0.12 XLA takes 30 to 60 times too long for ``x.sum(0)`` if rows are long:
    it reads memory in steps of a row. Parts of the axis are added as arrays instead.
    """
    axes, combine = node.params["axes"], COMBINE.get(node.primitive)
    if (
        not SLOW_LEADING_SUMS
        or jax.default_backend() != "cpu"
        or combine is None
        or tuple(axes) != tuple(range(len(axes)))
        or len(axes) == x.ndim
        or math.prod(x.shape[len(axes) :]) < LONG_ROW
        # Short floats would be rounded after each sum. XLA sums them in float32.
        or not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype.itemsize >= 4)
    ):
        return x
    rows = lax.collapse(x, 0, len(axes))
    while (size := len(rows)) > 1:
        length = max(size // FOLDED, 1)
        parts = [rows[k : k + length] for k in range(0, size - length + 1, length)]
        total = functools.reduce(combine, parts)
        rest = rows[len(parts) * length :]
        rows = lax.concatenate([total, rest], 0) if len(rest) else total
    return rows.reshape((len(rows),) + (1,) * (len(axes) - 1) + rows.shape[1:])


def sorted_operands(
    params: Mapping[str, Any], operands: Sequence[Any]
) -> Sequence[Any]:
    """A sort, on CPU of one float as integers of the same order.

    XLA for CPU compares floats by a function that it calls for each pair, which takes
    five times as long. -0.0 comes before 0.0, and NaN last.
    """
    [x, *others], axis = operands, params["dimension"]
    is_slow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    if others or not is_slow or jax.default_backend() != "cpu":
        return p.sort_p.bind(*operands, **params)
    bits = np.dtype(f"int{8 * x.dtype.itemsize}")
    most = np.array(np.iinfo(bits).max, bits)

    def with_order(number: Any) -> Any:
        """Inverts the order of negative numbers; its own inverse."""
        return jnp.where(number < 0, number ^ most, number)

    keys = with_order(lax.bitcast_convert_type(x, bits))
    keys = jnp.where(jnp.isnan(x), most, keys)
    # An axis in steps takes up to twice as long.
    [keys] = p.sort_p.bind(
        jnp.moveaxis(keys, axis, -1), **{**params, "dimension": x.ndim - 1}
    )
    keys = with_order(jnp.moveaxis(keys, -1, axis))
    return [lax.bitcast_convert_type(keys, x.dtype)]


def convolved(params: Mapping[str, Any], lhs: Any, rhs: Any) -> Any:
    """A convolution of many features, on CPU with these on the last axes.

    XLA for CPU has a fast kernel for that layout only. It converts other layouts, but
    not inside of a loop, where they take 10 to 30 times as long. Of few features, or
    one in each group, that kernel is the slower one, by as much.
    """
    numbers = params["dimension_numbers"]
    pairs = math.prod(rhs.shape[axis] for axis in numbers.rhs_spec[:2])
    is_few = pairs < MANY_FEATURES * params["feature_group_count"]
    if is_few or jax.default_backend() != "cpu":
        return p.conv_general_dilated_p.bind(lhs, rhs, **params)
    count = len(numbers.lhs_spec) - 2
    images = (0, count + 1, *range(1, count + 1))
    last = lax.ConvDimensionNumbers(images, (count + 1, count, *range(count)), images)
    out = p.conv_general_dilated_p.bind(
        _moved(lhs, numbers.lhs_spec, last.lhs_spec),
        _moved(rhs, numbers.rhs_spec, last.rhs_spec),
        **{**params, "dimension_numbers": last},
    )
    return _moved(out, last.out_spec, numbers.out_spec)


def _moved(value: Any, source: Sequence[int], target: Sequence[int]) -> Any:
    """An array with its axes ``source`` moved to ``target``."""
    moves = dict(zip(target, source, strict=True))
    return lax.transpose(value, [moves[axis] for axis in range(len(moves))])
