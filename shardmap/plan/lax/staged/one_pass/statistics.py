"""Statistics of the pieces of a value, and how those of all pieces come together.

For every piece of ``x``, whatever its own centre ``p`` is,

    sum (x - c)**2  =  sum (x - p)**2  +  2 (p - c) sum (x - p)  +  n (p - c)**2

so that the mean of a piece as ``p`` and the two sums are all that is needed of it for
any ``c`` (Chan, Golub and LeVeque's formula). No difference of large numbers is formed:
what is added is small where the result is.

    sum exp(x - c)  =  sum exp(x - p) * exp(p - c)

is the same for softmax and log-sum-exp, with the largest element of a piece as ``p``;
and an argmax is that of the largest elements of all pieces.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors
from shardmap.plan.engine.nodes import (
    Node,
    Operand,
    PlanPrimitive,
    Value,
)
from shardmap.plan.engine.pieces import of_pieces
from shardmap.plan.engine.rules import RuleMaker

OF_PIECES = PlanPrimitive("statistics of pieces")

EdgesOfAxes = tuple[tuple[int, ...], ...]
"""Where the pieces of each axis begin, and its end; of an axis not reduced, none."""


def axes_of(edges: EdgesOfAxes) -> tuple[int, ...]:
    return tuple(axis for axis, each in enumerate(edges) if each)


def constant_along(c: Operand, axes: Sequence[int]) -> Operand | None:
    """A value that is the same all along these axes; None if it may not be."""
    if not isinstance(c, Value):
        return None
    if not c.shape:
        return c
    if len(c.shape) <= max(axes):
        return None
    if all(c.shape[axis] == 1 for axis in axes):
        return c
    node = c.producer
    if node is None or node.primitive is not p.broadcast_in_dim_p:
        return None
    [source, *others] = node.ins
    if others or not isinstance(source, Value):
        return None
    dims = node.params["broadcast_dimensions"]
    sizes = dict(zip(dims, source.shape, strict=True))
    return c if all(sizes.get(axis, 1) == 1 for axis in axes) else None


def short(x: jax.Array, perm: Sequence[int], axes: Sequence[int]) -> jax.Array:
    """A transpose of what is the same along axes, which get length 1."""
    if not x.ndim:
        return lax.broadcast(x, [1] * len(perm))
    x = lax.transpose(x, perm)
    for axis in axes:
        x = lax.slice_in_dim(x, 0, 1, axis=axis)
    return x


def unmoved(x: Value) -> tuple[Value, tuple[int, ...]]:
    """What a value is a transpose of, and which axis of that each of its axes is."""
    perm = tuple(range(len(x.shape)))
    while (node := x.producer) is not None and node.primitive is p.transpose_p:
        [source] = node.ins
        if not isinstance(source, Value):
            break
        perm = tuple(node.params["permutation"][axis] for axis in perm)
        x = source
    return x, perm


class Statistic(NamedTuple):
    """A statistic.

    Attributes:
      name: what it is of.
      numbers: how many numbers are taken of each piece.
      of_piece: takes them, of a piece and where it starts along the reduced axes, which
        stay with length 1.
      plain: the reductions whose result is made of the first of these numbers.
    """

    name: str
    numbers: int
    of_piece: Callable[..., Sequence[jax.Array]]
    plain: tuple[Any, ...]


def _summed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum; reduced axes stay."""
    return lax.expand_dims(lax.reduce_sum(x, axes), axes)


def _like(x: jax.Array, rows: Any) -> jax.Array:
    return lax.broadcast_in_dim(rows, x.shape, range(x.ndim))


def _mean(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The sum and the mean."""
    count = math.prod(x.shape[axis] for axis in axes)
    total = _summed(x, axes)
    return total, total / np.asarray(count, x.dtype)


def _squares(x: jax.Array, axes: tuple[int, ...], *starts: Any) -> Sequence[jax.Array]:
    total, mean = _mean(x, axes)
    rest = _summed(x - _like(x, mean), axes)
    squares = _summed(lax.square(x - _like(x, mean)), axes)
    return total, squares, rest, mean


def all_squares(
    centre: jax.Array,
    counts: np.ndarray,
    axes: tuple[int, ...],
    squares: jax.Array,
    rest: jax.Array,
    mean: jax.Array,
) -> jax.Array:
    off = mean - _like(mean, centre)
    two, count = np.asarray(2, mean.dtype), _like(mean, counts.astype(mean.dtype))
    own = squares + off * (two * rest + count * off)
    # Rounded, what is 0 may be a little less.
    return lax.reduce_sum(lax.max(own, lax.full_like(own, 0)), axes)


def _exponentials(
    x: jax.Array, axes: tuple[int, ...], *starts: Any
) -> Sequence[jax.Array]:
    largest = lax.expand_dims(lax.reduce_max(x, axes), axes)
    centre = _finite(largest)
    sums = _summed(lax.exp(x - _like(x, centre)), axes)
    return largest, sums, centre


def away(x: jax.Array, axes: tuple[int, ...], kind: "Statistic") -> jax.Array:
    """A piece around its own centre, of an exponential its exponentials."""
    if kind is SQUARES:
        return x - _like(x, _mean(x, axes)[1])
    largest = lax.expand_dims(lax.reduce_max(x, axes), axes)
    return lax.exp(x - _like(x, _finite(largest)))


def _finite(x: jax.Array) -> jax.Array:
    return lax.select(lax.is_finite(x), x, lax.full_like(x, 0))


def all_exponentials(
    centre: jax.Array,
    axes: tuple[int, ...],
    sums: jax.Array,
    largest: jax.Array,
) -> jax.Array:
    scaled = sums * lax.exp(largest - _like(largest, centre))
    # Of elements that are all -inf nothing is added, whatever it is scaled by.
    return lax.reduce_sum(lax.select(sums == 0, sums, scaled), axes)


SQUARES = Statistic("squares", 4, _squares, (p.reduce_sum_p,))
EXPONENTIALS = Statistic("exponentials", 3, _exponentials, (p.reduce_max_p,))


@functools.cache
def place_of(largest: bool, dtype: Any) -> Statistic:
    """The statistic of an argmax, of that index type."""
    arg = lax.argmax if largest else lax.argmin

    def of_piece(
        x: jax.Array, axes: tuple[int, ...], start: Any
    ) -> Sequence[jax.Array]:
        [axis] = axes
        place = lax.expand_dims(arg(x, axis, dtype), axes)
        best = jnp.take_along_axis(x, place, axis)
        return best, place + jnp.asarray(start).astype(dtype)

    plain = p.reduce_max_p if largest else p.reduce_min_p
    return Statistic(str(plain), 2, of_piece, (plain,))


def all_places(
    largest: bool, axis: int, best: jax.Array, places: jax.Array
) -> jax.Array:
    arg = lax.argmax if largest else lax.argmin
    first = _like(best, lax.expand_dims(arg(best, axis, np.int32), (axis,)))
    found = lax.eq(first, lax.broadcasted_iota(np.int32, best.shape, axis))
    return lax.reduce_max(lax.select(found, places, lax.full_like(places, 0)), (axis,))


def counts_of(edges: EdgesOfAxes, axes: Sequence[int]) -> np.ndarray:
    """How many elements each piece has."""
    rank = len(edges)
    found = np.ones((1,) * rank)
    for axis in axes:
        lengths = np.diff(edges[axis])
        found = found * lengths.reshape([-1 if k == axis else 1 for k in range(rank)])
    return found


def statistics_of_pieces(node: Node) -> Factors:
    """``i~ j -> i j, i j``: what is taken of each piece of the reduced axes."""
    kind: Statistic = node.params["kind"]
    edges: EdgesOfAxes = node.params["edges"]
    axes = range(len(edges))

    def of_piece(
        piece: jax.Array, starts: Mapping[Any, jax.Array]
    ) -> Sequence[jax.Array]:
        return kind.of_piece(piece, axes_of(edges), *starts.values())

    return of_pieces(
        *(node, [axes], [axes] * len(node.outs)),
        *({axis: edges[axis] for axis in axes_of(edges)}, of_piece),
        starts=axes_of(edges),
        each=4,
    )


RULES: dict[Any, RuleMaker] = {OF_PIECES: statistics_of_pieces}
