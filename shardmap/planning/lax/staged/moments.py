"""Sums of squares and products around a centre, from those around means of pieces.

``((x - c) ** 2).sum(0)`` needs ``c``, usually the mean of ``x``, before it can read
``x`` again. But for every piece of ``x`` and ``y``, and any numbers ``p`` and ``q``,

    sum (x - c)(y - d)  =  sum (x - p)(y - q)  +  (p - c) sum (y - q)
                        +  sum (x - p) (q - d)  +  n (p - c)(q - d)

so the means of the piece as ``p`` and ``q`` and three sums determine the result for any
``c`` and ``d`` (Chan, Golub and LeVeque). The formula does not subtract large numbers.
It gives variances and covariances.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.nodes import Value, made_by
from shardmap.planning.lax.staged.statistics import (
    Edges,
    Product,
    Statistic,
    Term,
    is_constant,
    unmoved,
)


def _mean(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The sum and the mean."""
    total = lax.expand_dims(lax.reduce_sum(x, axes), axes)
    count = math.prod(x.shape[axis] for axis in axes)
    return total, total / np.asarray(count, x.dtype)


def _centred(x: jax.Array, axes: Sequence[int], *starts: Any) -> list[jax.Array]:
    """The sum, the mean, and the rounding error of the mean: the sum around it."""
    total, mean = _mean(x, axes)
    return [total, mean, lax.expand_dims(lax.reduce_sum(x - mean, axes), axes)]


def _around_mean(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return x - _mean(x, axes)[1]


CENTRED = Statistic(3, _centred, p.reduce_sum_p, _around_mean)


def centred(plain: Term, gone: Sequence[int], any_sign: bool) -> Term | None:
    """``x - c`` in a factor of a product; None if it is not one.

    Args:
      plain: the factor, as ``x`` itself.
      gone: the names of the axes that are summed over.
      any_sign: whether ``c - x`` counts too, as in a square.
    """
    value, names = unmoved(plain.x, plain.names)
    if (minus := made_by(value, p.sub_p)) is None:
        return None
    axes = [names.index(name) for name in gone]
    for x, c in [minus.ins, minus.ins[::-1]][: 1 + any_sign]:
        if isinstance(x, Value) and x.shape == value.shape and is_constant(c, axes):
            return Term(*unmoved(x, names), CENTRED, (c, names))
    return None


def combined(
    product: Product,
    edges: Edges,
    sums: jax.Array,
    c: jax.Array,
    d: jax.Array,
    *arrays: Any,
) -> jax.Array:
    """The sum of ``(x - c)(y - d)``, from the sums around the means of pieces."""
    x, y = product.terms
    _, mean, rest, _, other, other_rest = arrays
    off = mean - x.short(c, x.c, product.gone)
    far = other - y.short(d, y.c, product.gone)
    counts = np.ones([1] * off.ndim, off.dtype)
    for axis, ends in edges:
        others = tuple(k for k in range(off.ndim) if k != axis)
        counts = counts * np.expand_dims(np.diff(ends).astype(off.dtype), others)
    pairs = (rest + off * counts, far), (off, other_rest)
    more = [product.sum(pair, lax.Precision.HIGHEST) for pair in pairs]
    total = sums.sum(range(len(product.gone))) + (more[0] + more[1])
    # Rounded, a sum of squares that is 0 may be a little less.
    return jnp.maximum(total, 0) if x == y else total
