"""What shards compute in another way than XLA where XLA for CPU is slow.

Each of these is asked where its equation is emitted, and looks at no more than that
equation and what its operand is made of. On other backends they do nothing.
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
from shardmap.planning.lax import pointwise

LONG_ROW = 2**15
"""The fewest elements of a long row. XLA is fast at shorter ones."""

FOLDED = 8
"""How many parts of an axis are added at a time."""

MOST_SHIFTS = 256
"""The most elements of a kernel whose products are added one by one."""

MOST_LOOKED_AT = 64
"""The most equations that `_is_of_slices` looks at."""

SLICES = frozenset({p.dynamic_slice_p, p.slice_p})
"""The primitives whose results XLA stores if it fuses their users with a reduction."""

MOVES = frozenset({p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p, p.transpose_p})
"""The primitives that XLA fuses with a reduction as it does elementwise ones."""

COMBINE: Mapping[Any, Callable[[Any, Any], Any]] = {
    p.reduce_sum_p: lax.add,
    p.reduce_max_p: lax.max,
    p.reduce_min_p: lax.min,
}


def reduction_of(node: Node, x: Any) -> Any:
    """The operand of a reduction, perhaps with its leading axes reduced to size 1.

    Before JAX 0.12 XLA takes 30 to 60 times too long for ``x.sum(0)`` if rows are long:
    it reads memory in steps of a row. Parts of the axis are added as arrays instead.
    Of ``((x[1:] - x[:-1]) ** 2).sum()`` XLA stores both slices, as it fuses the
    difference with the sum. Not fused, it takes a half to a ninth of the time.
    """
    if jax.default_backend() != "cpu":
        return x
    if _is_of_slices(node):
        x = _not_fused(x)
    if not SLOW_LEADING_SUMS or node.primitive not in COMBINE:
        return x
    axes, combine = node.params["axes"], COMBINE[node.primitive]
    if (
        tuple(axes) != tuple(range(len(axes)))
        or len(axes) == x.ndim
        or math.prod(x.shape[len(axes) :]) < LONG_ROW
        # Short floats would be rounded after each sum. XLA sums them in float32.
        or not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype.itemsize >= 4)
    ):
        return x
    for axis in axes:
        while (size := x.shape[axis]) > 1:
            parts = min(FOLDED, size)
            length, rest = divmod(size, parts)
            cut = functools.partial(lax.slice_in_dim, x, axis=axis)
            slices = [cut(k * length, (k + 1) * length) for k in range(parts)]
            total = functools.reduce(combine, slices)
            if rest:
                total = lax.concatenate([total, cut(size - rest, size)], axis)
            x = total
    return x


def _is_of_slices(node: Node) -> bool:
    """Whether a node reduces an elementwise function of several slices."""
    stack, slices = list(node.ins[:1]), set()
    for operand in stack:
        producer = operand.producer
        if producer is None or len(stack) > MOST_LOOKED_AT:
            continue
        if producer.primitive in SLICES:
            slices.add(producer)
        elif producer.primitive in MOVES or producer.primitive in pointwise.RULES:
            stack += [x for x in producer.ins if x not in stack]
    return len(slices) > 1


def _not_fused(x: Any) -> Any:
    """The same numbers, which XLA does not compute in a kernel of what uses them."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


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
    """A convolution, on CPU with its features on the last axes.

    XLA for CPU has a fast kernel for that layout only. It converts other layouts, but
    not inside of a loop, where they take five to ten times as long.
    """
    if jax.default_backend() != "cpu":
        return p.conv_general_dilated_p.bind(lhs, rhs, **params)
    if (total := _shifted_sum(params, lhs, rhs)) is not None:
        return total
    numbers = params["dimension_numbers"]
    count = len(numbers.lhs_spec) - 2
    images = (0, count + 1, *range(1, count + 1))
    last = lax.ConvDimensionNumbers(images, (count + 1, count, *range(count)), images)
    out = p.conv_general_dilated_p.bind(
        _moved(lhs, numbers.lhs_spec, last.lhs_spec),
        _moved(rhs, numbers.rhs_spec, last.rhs_spec),
        **{**params, "dimension_numbers": last},
    )
    return _moved(out, last.out_spec, numbers.out_spec)


def _shifted_sum(params: Mapping[str, Any], lhs: Any, rhs: Any) -> Any:
    """A convolution of each feature by itself, as a sum of shifted images.

    XLA for CPU is 4 to 20 times as slow at it.

    Returns:
      The result; None if features are mixed, numbers are short or the kernel is large.
    """
    numbers = params["dimension_numbers"]
    features, inner, *extents = (rhs.shape[axis] for axis in numbers.rhs_spec)
    _, along, *spatial = numbers.lhs_spec
    dtypes = {lhs.dtype, rhs.dtype, params["preferred_element_type"] or lhs.dtype}
    if (
        not inner == 1 <= features == params["feature_group_count"] == lhs.shape[along]
        or params["batch_group_count"] > 1
        or math.prod(extents) > MOST_SHIFTS
        or len(dtypes) > 1
        or lhs.dtype.itemsize < 4
    ):
        return None
    around, strides = [(0, 0, 0)] * lhs.ndim, [1] * lhs.ndim
    for k, axis in enumerate(spatial):
        around[axis] = (*params["padding"][k], params["lhs_dilation"][k] - 1)
        strides[axis] = params["window_strides"][k]
    image = lax.pad(lhs, np.zeros((), lhs.dtype), around)
    kernels = _moved(rhs, numbers.rhs_spec, range(rhs.ndim))
    kernels = lax.reshape(kernels, (features, math.prod(extents)))
    products = []
    for number, place in enumerate(np.ndindex(*extents)):
        starts, limits = [0] * lhs.ndim, list(image.shape)
        for k, axis in enumerate(spatial):
            behind = extents[k] - 1 - place[k]
            starts[axis] = place[k] * params["rhs_dilation"][k]
            limits[axis] -= behind * params["rhs_dilation"][k]
        shifted = lax.slice(image, starts, limits, strides)
        kernel = lax.index_in_dim(kernels, number, 1, keepdims=False)
        kernel = lax.broadcast_in_dim(kernel, shifted.shape, (along,))
        products.append(shifted * kernel)
    total = _not_fused(functools.reduce(lax.add, products))
    return _moved(total, numbers.lhs_spec, numbers.out_spec)


def _moved(value: Any, source: Sequence[int], target: Sequence[int]) -> Any:
    """An array with its axes ``source`` moved to ``target``."""
    moves = dict(zip(target, source, strict=True))
    return lax.transpose(value, [moves[axis] for axis in range(len(moves))])
