"""Products of pieces: those of two centred values, and weighted by exponentials.

What `statistics` says of squares holds for a product of two values, each with a centre
of its own: for every piece, with means ``p`` and ``q`` of its own,

    sum (x - c)(y - d)  =  sum (x - p)(y - q)  +  (p - c) sum (y - q)
                        +  sum (x - p) (q - d)  +  n (p - c)(q - d)

as in covariances. With the largest element of a piece as ``p``,

    sum exp(x - c) y  =  sum exp(x - p) y * exp(p - c)

is what attention takes of keys and values. The sums are those of a ``dot_general``, of
which a reduced product of elements is one without free axes.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap.plan.engine.factors import Factors
from shardmap.plan.engine.nodes import Node, PlanPrimitive
from shardmap.plan.engine.pieces import of_pieces
from shardmap.plan.engine.rules import RuleMaker
from shardmap.plan.lax.staged.one_pass.statistics import Statistic, away

PRODUCTS = PlanPrimitive("products of pieces")

Axes = tuple[int, ...]
Dims = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
"""The dimension numbers of a ``dot_general``: contracted axes, then batch axes."""


class ProductParams(NamedTuple):
    """What tells the products of one equation from those of another.

    Attributes:
      dims: the axes, of operands as the equation has them.
      perms: which axis of the values that are read each of these axes is.
      kinds: of which kind each operand is, None for one that is taken as it is.
      place: which of the contracted axes is cut.
      edges: where its pieces lie.
      precision: of the product.
    """

    dims: Dims
    perms: tuple[Axes, Axes]
    kinds: tuple[Statistic | None, Statistic | None]
    place: int
    edges: tuple[int, ...]
    precision: Any


def free_axes(dims: Dims, side: int, rank: int) -> list[int]:
    """The axes of an operand that are neither contracted nor batch axes."""
    taken = {*dims[0][side], *dims[1][side]}
    return [axis for axis in range(rank) if axis not in taken]


def dot(a: jax.Array, b: jax.Array, dims: Dims, precision: Any) -> jax.Array:
    """A ``dot_general``, which without free axes is a sum of elements."""
    ranks = a.ndim, b.ndim
    if any(free_axes(dims, side, ranks[side]) for side in (0, 1)):
        return lax.dot_general(a, b, dims, precision)
    (contracted, _), (batch, batch_b) = dims
    both = dict(zip((*contracted, *batch), (*dims[0][1], *batch_b), strict=True))
    b = lax.transpose(b, [both[axis] for axis in range(a.ndim)])
    left = sorted(batch)
    total = lax.reduce_sum(a * b, contracted)
    return lax.transpose(total, [left.index(axis) for axis in batch])


def of_piece(x: jax.Array, y: jax.Array, params: ProductParams) -> jax.Array:
    """The product of one piece, which has a number of its own in front.

    The values are not moved, as copies of them would take memory: the result is.
    """
    (left, right), (one, other) = params.dims[0], params.perms
    own = [
        (tuple(sorted(perm[axis] for axis in axes)), kind)
        for perm, axes, kind in zip(
            params.perms, params.dims[0], params.kinds, strict=True
        )
    ]
    a = x if own[0][1] is None else away(x, own[0][0], own[0][1])
    if x is y and own[0] == own[1]:
        b = a
    else:
        b = y if own[1][1] is None else away(y, own[1][0], own[1][1])
    batch = params.dims[1]
    dims: Dims = (
        (tuple(one[k] for k in left), tuple(other[k] for k in right)),
        (tuple(one[k] for k in batch[0]), tuple(other[k] for k in batch[1])),
    )
    found = dot(a, b, dims, params.precision)
    order = list(range(len(batch[0])))
    for side, perm in enumerate(params.perms):
        free = [perm[axis] for axis in free_axes(params.dims, side, len(perm))]
        order += [len(order) + sorted(free).index(axis) for axis in free]
    return lax.transpose(found, order)[None]


def all_centred(
    params: ProductParams,
    counts: np.ndarray,
    products: jax.Array,
    centres: Sequence[jax.Array],
    rests: Sequence[jax.Array],
    means: Sequence[jax.Array],
) -> jax.Array:
    """The product of all, from what is taken of pieces, in the axes of operands."""
    off, other = (mean - centre for mean, centre in zip(means, centres, strict=True))
    shape = [1] * off.ndim
    shape[params.dims[0][0][params.place]] = len(counts)
    count = jnp.asarray(counts.reshape(shape), off.dtype)
    product = functools.partial(dot, dims=params.dims, precision=lax.Precision.HIGHEST)
    more = product(off, rests[1]) + product(rests[0], other)
    return products.sum(0) + (more + product(count * off, other))


def all_weighted(
    params: ProductParams,
    products: jax.Array,
    centre: jax.Array,
    divisor: jax.Array | None,
    sums: jax.Array,
    own: jax.Array,
) -> jax.Array:
    """The same of exponentials, divided by what is the same along contracted axes."""
    side = 0 if params.kinds[0] is not None else 1
    scale = lax.exp(own - centre)
    # Of elements that are all -inf nothing is added, whatever it is scaled by.
    scale = lax.select(sums == 0, lax.full_like(scale, 0), scale)
    total = (products * _in_front(scale, params, side, products.ndim)).sum(0)
    if divisor is None:
        return total
    return total / _in_front(divisor, params, side, products.ndim)[0]


def _in_front(x: jax.Array, params: ProductParams, side: int, rank: int) -> jax.Array:
    """Its axes as in the products: that of pieces first, others of the operand."""
    contracted, batch = params.dims[0][side], params.dims[1][side]
    cut = contracted[params.place]
    free = free_axes(params.dims, side, x.ndim)
    rest = [axis for axis in contracted if axis != cut]
    x = lax.transpose(x, [cut, *batch, *free, *rest])
    x = x.reshape(x.shape[: x.ndim - len(rest)])
    others = rank - x.ndim
    before = 1 + len(batch) + (len(free) if side == 0 else 0)
    return lax.expand_dims(x, range(before, before + others))


def products_of_pieces(node: Node) -> Factors:
    """``i~ j, i~ k -> i j k``: the contracted axis that is cut becomes pieces."""
    params: ProductParams = node.params["params"]
    dims, perms = params.dims, params.perms
    ins: list[list[Any]] = [
        [(side, axis) for axis in range(len(perm))] for side, perm in enumerate(perms)
    ]
    # Axes that are contracted or go together have one name.
    for left, right in zip(
        (*dims[0][0], *dims[1][0]), (*dims[0][1], *dims[1][1]), strict=True
    ):
        ins[1][perms[1][right]] = ins[0][perms[0][left]]
    cut = ins[0][perms[0][dims[0][0][params.place]]]
    free = [
        ins[side][perm[axis]]
        for side, perm in enumerate(perms)
        for axis in free_axes(dims, side, len(perm))
    ]
    batch = [ins[0][perms[0][axis]] for axis in dims[1][0]]
    edges = {cut: params.edges}
    return of_pieces(
        *(node, ins, [[cut, *batch, *free]], edges),
        lambda x, y, starts: [of_piece(x, y, params)],
        each=2,
    )


RULES: dict[Any, RuleMaker] = {PRODUCTS: products_of_pieces}
