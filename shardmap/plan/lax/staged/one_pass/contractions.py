"""Covariances and attention in one pass: sums of products that need a centre.

``(x - c).T @ (y - d)`` and ``exp(x - c) @ y``, the latter divided by its sums as in a
softmax or not, are put together of `products` of pieces, as `once` does with squares
and exponentials alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import meet
from shardmap.plan.lax.staged.barrier import barrier
from shardmap.plan.lax.staged.one_pass.products import (
    PRODUCTS,
    Dims,
    ProductParams,
    all_centred,
    all_weighted,
)
from shardmap.plan.lax.staged.one_pass.statistics import (
    EXPONENTIALS,
    SQUARES,
    EdgesOfAxes,
    Statistic,
    constant_along,
    short,
    unmoved,
)

SMALLER = 8
"""How much smaller than what would be read again the products of all pieces are."""

Perm = tuple[int, ...]
NumberOf = Callable[[int], Operand]
"""Gives one of the numbers of all pieces."""


class Side(NamedTuple):
    """An operand of a product as a function of ``x - c``.

    Attributes:
      value: ``x``.
      perm: which axis of it each axis of the operand is.
      kind: the statistic; None for the operand as it is.
      centre: ``c``, and its axes, as in ``perm``.
      divisor: what an exponential is divided by, and its axes.
    """

    value: Value
    perm: Perm
    kind: Statistic | None = None
    centre: tuple[Operand, Perm] | None = None
    divisor: tuple[Operand, Perm] | None = None


class Product(NamedTuple):
    """A sum of products.

    Attributes:
      sides: the operands.
      dims: which axes are summed over, and which go together.
      precision: of a ``dot_general``.
    """

    sides: tuple[Side, Side]
    dims: Dims
    precision: Any


def _side(operand: Value, axes: Sequence[int]) -> Side:
    """An operand, of which these axes are summed over."""
    value: Operand = operand
    perm, divisor = tuple(range(len(operand.shape))), None
    while isinstance(value, Value) and (node := value.producer) is not None:
        along = [perm[axis] for axis in axes]
        if node.primitive is p.transpose_p:
            perm = tuple(node.params["permutation"][axis] for axis in perm)
        elif node.primitive is p.div_p and divisor is None:
            if node.ins[0].shape != value.shape:
                break
            if (own := constant_along(node.ins[1], along)) is None:
                break
            divisor = own, perm
        else:
            exponential = node.primitive is p.exp_p
            inner = node.ins[0] if exponential else value
            minus = inner.producer if isinstance(inner, Value) else None
            if minus is None or minus.primitive is not p.sub_p:
                break
            if divisor is not None and not exponential:
                break
            x, c = minus.ins
            centre = constant_along(c, along)
            if centre is None or not isinstance(x, Value) or x.shape != value.shape:
                break
            kind = EXPONENTIALS if exponential else SQUARES
            base, of = unmoved(x)
            moved = tuple(of[axis] for axis in perm)
            return Side(base, moved, kind, (centre, perm), divisor)
        value = node.ins[0]
    return Side(operand, tuple(range(len(operand.shape))))


def recognised(
    primitive: Any, params: Params, ins: Sequence[Operand]
) -> Product | None:
    """The equation as a contraction that can be taken in one pass; None if not."""
    if primitive is p.dot_general_p:
        pair, dims, precision = ins, params["dimension_numbers"], params["precision"]
        kind = params["preferred_element_type"]
    elif primitive is p.reduce_sum_p and isinstance(ins[0], Value):
        node, axes = ins[0].producer, tuple(params["axes"])
        if node is None or node.primitive is not p.mul_p:
            return None
        rest = tuple(k for k in range(len(ins[0].shape)) if k not in axes)
        pair, dims, precision, kind = node.ins, ((axes, axes), (rest, rest)), None, None
    else:
        return None
    a, b = pair
    dtype = a.aval.dtype
    if not (isinstance(a, Value) and isinstance(b, Value)) or b.aval.dtype != dtype:
        return None
    if primitive is p.reduce_sum_p and a.shape != b.shape:
        return None
    plain = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
    if not plain or kind not in (None, dtype):
        return None
    dims = tuple(tuple(tuple(map(int, axes)) for axes in each) for each in dims)
    sides = _side(a, dims[0][0]), _side(b, dims[0][1])
    kinds = [side.kind for side in sides]
    if kinds == [SQUARES, SQUARES] and None not in kinds:
        return Product(sides, dims, precision)
    if kinds.count(EXPONENTIALS) == 1:
        # The other one is taken as it is, whatever it is made of.
        whole = [
            side if side.kind is EXPONENTIALS else Side(v, tuple(range(len(v.shape))))
            for side, v in zip(sides, (a, b), strict=True)
        ]
        return Product((whole[0], whole[1]), dims, precision)
    return None


def params_of(analysis: Analysis, node: Node, found: Product) -> ProductParams | None:
    """How the products of pieces are taken; None if two passes read less."""
    [out] = node.outs
    values = [side.value for side in found.sides]
    early = all(analysis.level[v] < analysis.level[out] for v in values)
    if not early or any(v in analysis.pending for v in values):
        return None
    cuts = []
    for axes in zip(*found.dims[0], strict=True):
        pairs = zip(found.sides, axes, strict=True)
        cuts.append(meet([analysis.cuts[s.value][s.perm[axis]] for s, axis in pairs]))
    cut = [k for k, own in enumerate(cuts) if own.at]
    if len(cut) != 1:
        return None
    [place] = cut
    [left, _] = found.sides
    size = left.value.shape[left.perm[found.dims[0][0][place]]]
    edges = (0, *cuts[place].at, size)
    kept = (len(edges) - 1) * out.size * itemsize(out.aval)
    if kept * SMALLER > analysis.work.bytes_read(values):
        return None
    kinds = tuple(side.kind for side in found.sides)
    assert len(kinds) == 2
    one, other = (side.perm for side in found.sides)
    return ProductParams(found.dims, (one, other), kinds, place, edges, found.precision)


def edges_of_sides(found: Product, params: ProductParams) -> list[EdgesOfAxes | None]:
    """Where the pieces of each side's value lie; None for one taken as it is."""
    made: list[EdgesOfAxes | None] = []
    for side, axes in zip(found.sides, params.dims[0], strict=True):
        own: list[tuple[int, ...]] = [()] * len(side.perm)
        for k, axis in enumerate(axes):
            size = side.value.shape[side.perm[axis]]
            own[side.perm[axis]] = params.edges if k == params.place else (0, size)
        made.append(tuple(own) if side.kind is not None else None)
    return made


def write(
    graph: Graph,
    found: Product,
    params: ProductParams,
    parts: Callable[[Operand, Statistic, EdgesOfAxes], NumberOf],
) -> Sequence[Operand]:
    """Adds the products of pieces, and what puts them together.

    Args:
      graph: where.
      found: the contraction.
      params: how its products are taken.
      parts: gives the statistics of the pieces of a value.
    """
    operands = [side.value for side in found.sides]
    one = jax.eval_shape(
        functools.partial(lax.dot_general, dimension_numbers=params.dims),
        *(
            jax.ShapeDtypeStruct([s.value.shape[k] for k in s.perm], s.value.aval.dtype)
            for s in found.sides
        ),
    )
    made = jax.core.ShapedArray((len(params.edges) - 1, *one.shape), one.dtype)
    [own] = graph.add(PRODUCTS, {"params": params}, operands, [made])
    products = barrier(graph, own, passing=range(1, len(made.shape)))
    numbers = [
        None
        if edges is None or side.kind is None
        else parts(side.value, side.kind, edges)
        for side, edges in zip(found.sides, edges_of_sides(found, params), strict=True)
    ]
    if None not in params.kinds:
        return _centred(graph, found, params, products, numbers)
    return _weighted(graph, found, params, products, numbers)


def _centred(
    graph: Graph,
    found: Product,
    params: ProductParams,
    products: Operand,
    numbers: Sequence[NumberOf | None],
) -> Sequence[Operand]:
    counts = np.diff(params.edges)
    for k, axes in enumerate(zip(*params.dims[0], strict=True)):
        if k != params.place:
            side = found.sides[0]
            counts = counts * side.value.shape[side.perm[axes[0]]]

    def together(products: jax.Array, *rows: jax.Array) -> jax.Array:
        pairs = [*zip(rows[::2], rows[1::2], strict=True)]
        perms = [side.perm for side in found.sides]
        own = [side.centre[1] for side in found.sides if side.centre is not None]
        centres = [
            short(c, perm, axes)
            for c, perm, axes in zip(pairs[0], own, params.dims[0], strict=True)
        ]
        others = [
            [lax.transpose(x, perm) for x, perm in zip(pair, perms, strict=True)]
            for pair in pairs[1:]
        ]
        return all_centred(params, counts, products, centres, *others)

    operands: list[Operand] = [products]
    operands += [side.centre[0] for side in found.sides if side.centre is not None]
    for number in (2, 3):
        operands += [part(number) for part in numbers if part is not None]
    return graph.call(together, operands)


def _weighted(
    graph: Graph,
    found: Product,
    params: ProductParams,
    products: Operand,
    numbers: Sequence[NumberOf | None],
) -> Sequence[Operand]:
    [number] = [k for k, kind in enumerate(params.kinds) if kind is not None]
    side, axes, part = found.sides[number], params.dims[0][number], numbers[number]
    assert part is not None
    assert side.centre is not None
    centre_of, centre_perm = side.centre

    def together(
        products: jax.Array,
        sums: jax.Array,
        own: jax.Array,
        centre: jax.Array,
        *divisor: jax.Array,
    ) -> jax.Array:
        below = None
        if side.divisor is not None:
            below = short(divisor[0], side.divisor[1], axes)
        sums, own = (lax.transpose(x, side.perm) for x in (sums, own))
        middle = short(centre, centre_perm, axes)
        return all_weighted(params, products, middle, below, sums, own)

    operands = [products, part(1), part(2), centre_of]
    if side.divisor is not None:
        operands.append(side.divisor[0])
    return graph.call(together, operands)
