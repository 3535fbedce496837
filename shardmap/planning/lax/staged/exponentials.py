"""Sums of exponentials around a centre, from those around maxima of pieces.

Softmax, log-sum-exp and attention need the maximum of ``x`` as ``c`` before they can
read ``x`` again. But with the maximum of a piece as ``p``,

    sum exp(x - c) y  =  sum exp(x - p) y * exp(p - c)

so the sums and the maxima of pieces determine the result.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.nodes import Operand, Value, made_by
from shardmap.planning.lax.staged.statistics import (
    Edges,
    Names,
    Product,
    Statistic,
    Term,
    in_names,
    is_constant,
    unmoved,
)


def _largest(x: jax.Array, axes: Sequence[int], *starts: Any) -> list[jax.Array]:
    """The maximum, and the same where it is finite."""
    largest = jnp.max(x, axes, keepdims=True)
    return [largest, jnp.where(jnp.isfinite(largest), largest, 0)]


def _around_largest(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return jnp.exp(x - _largest(x, axes)[1])


EXPONENTIAL = Statistic(2, _largest, p.reduce_max_p, _around_largest)


def exponential(plain: Term, gone: Sequence[int]) -> Term | None:
    """``exp(x - c) / d`` in a factor of a product; None if it is not one.

    Args:
      plain: the factor, as ``x`` itself.
      gone: the names of the axes that are summed over.
    """
    value, names = unmoved(plain.x, plain.names)
    divisor: tuple[Operand, Names] | None = None
    if quotient := made_by(value, p.div_p):
        above, below = quotient.ins
        axes = [names.index(name) for name in gone]
        if isinstance(above, Value) and above.shape == value.shape:
            if is_constant(below, axes):
                divisor = below, names
                value, names = unmoved(above, names)
    node = made_by(value, p.exp_p)
    minus = made_by(node.ins[0], p.sub_p) if node else None
    if minus is None:
        return None
    (x, c), axes = minus.ins, [names.index(name) for name in gone]
    if not isinstance(x, Value) or x.shape != value.shape or not is_constant(c, axes):
        return None
    return Term(*unmoved(x, names), EXPONENTIAL, (c, names), divisor)


def combined(
    product: Product, edges: Edges, sums: jax.Array, c: jax.Array, *arrays: jax.Array
) -> jax.Array:
    """The sum of ``exp(x - c) y / d``, from those around the maxima of pieces."""
    *divisor, largest, finite = arrays
    [term] = [term for term in product.terms if term.kind is not None]
    gone, front = product.gone, [*product.gone, *product.out]
    # A piece that is all -inf adds nothing, or NaN if the centre is -inf too.
    around = jnp.where(largest == -jnp.inf, largest, finite)
    scale = jnp.exp(around - term.short(c, term.c, gone))
    scaled = sums * in_names(scale, term.names, front)
    total = scaled.sum(range(len(gone)))
    for d in divisor:
        below = in_names(term.short(d, term.d, gone), term.names, front)
        total = total / lax.squeeze(below, range(len(gone)))
    return total
