"""Finds the reductions that can be computed from a state that is read once.

Variances, covariances, log-sum-exp, softmax, attention: a sum of products of ``x - c``,
or of ``exp(x - c)`` with anything, where ``c`` is made of a reduction whose axis is
cut, so that it is complete only in a later stage. And the places of extrema.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import bind
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value, made_by
from shardmap.planning.engine.rules import Cut, Stages
from shardmap.planning.lax.reduce import arg_fits, dot_names, wide
from shardmap.planning.lax.staged.barrier import barrier
from shardmap.planning.lax.staged.monoids import (
    EXPONENTIALS,
    LARGEST,
    MOMENTS,
    PLACE,
    SMALLEST,
    SUM,
    add_state,
    around,
    finite,
    scaled,
)

Names: TypeAlias = tuple[int, ...]
"""A name for each axis; axes that are multiplied with each other share one."""


class _Term(NamedTuple):
    """A factor of a product: ``x``, ``x - c`` or ``exp(x - c) / d``."""

    x: Value
    names: Names
    c: Operand | None = None
    d: Operand | None = None
    is_exponential: bool = False

    def axes(self, out: Names) -> tuple[int, ...]:
        """The axes that are summed over."""
        return tuple(k for k, name in enumerate(self.names) if name not in out)

    def beside(self, x: jax.Array, out: Names) -> jax.Array:
        """An array, of length 1 along what is summed over, in the axes of ``out``."""
        if not x.ndim:
            return x
        x = lax.squeeze(x, self.axes(out))
        kept = [name for name in self.names if name in out]
        x = lax.transpose(x, [kept.index(name) for name in out if name in kept])
        return lax.expand_dims(x, [k for k, n in enumerate(out) if n not in kept])

    def out(self, out: Names) -> list[int | None]:
        """The factors of an array that is `beside` others."""
        return [name if name in self.names else None for name in out]


class _Product(NamedTuple):
    """A sum of products of one or two values; ``total`` sums those of others."""

    terms: list[_Term]
    out: Names
    total: Callable[[Sequence[jax.Array]], jax.Array]


SUMS = (p.dot_general_p, p.reduce_sum_p)
"""The primitives of sums that `as_state` looks at."""


def as_state(
    graph: Graph,
    node: Node,
    cuts: Sequence[Sequence[Cut]],
    made_of: Mapping[Operand, int],
) -> Sequence[Operand] | None:
    """Writes a sum around a centre as what follows from a state; None if it is none.

    ``made_of`` are the reductions over cut axes that values are made of, as bits.
    """
    product = _product_of(node)
    if product is None or not all(x.aval.size for x in node.ins):
        return None
    terms, out = product.terms, product.out
    exponentials = [_exponential(term, out) or term for term in terms]
    if sum(term.is_exponential for term in exponentials) == 1:
        product = product._replace(terms=exponentials)
    else:
        is_square = terms[1:] == terms[:1]
        centred = [_minus(term.x, term, out, any_sign=is_square) for term in terms]
        if len(centred) != 2 or None in centred:
            return None
        product = product._replace(terms=[term for term in centred if term])
    read = late = 0
    for term in product.terms:
        read |= made_of.get(term.x, 0)
        late |= 0 if term.c is None else made_of.get(term.c, 0)
    if not late & ~read:
        return None  # A second pass would be in the same stage.
    # Each shard must have its part of all arrays of the state.
    names = [term.names for term in terms[: len(cuts)]]
    pairs = zip(itertools.chain(*names), itertools.chain(*cuts), strict=True)
    cut = {name for name, each in pairs if each.at}.intersection(out)
    if any(term.c is not None and not cut <= {*term.names} for term in product.terms):
        return None
    dtype = node.outs[0].aval.dtype
    widest = wide(dtype)
    if any(term.x.aval.dtype.itemsize > widest.itemsize for term in product.terms):
        return None
    write = _exponentials if any(t.is_exponential for t in product.terms) else _moments
    return write(graph, product, dtype, widest)


def _exponentials(
    graph: Graph, product: _Product, dtype: Any, widest: Any
) -> Sequence[Operand]:
    terms, out = product.terms, product.out
    [which] = [k for k, term in enumerate(terms) if term.is_exponential]
    term = terms[which]
    assert term.c is not None

    def state(*values: jax.Array) -> list[jax.Array]:
        factors = list(values)
        x = factors[which].astype(widest)
        largest = jnp.max(x, term.axes(out), keepdims=True)
        factors[which] = jnp.exp(x - finite(jnp, largest)).astype(values[which].dtype)
        return [term.beside(largest, out), product.total(factors)]

    def result(
        largest: jax.Array, total: jax.Array, c: jax.Array, *d: jax.Array
    ) -> Any:
        centre, *divisors = (term.beside(x, out) for x in (c, *d))
        total = scaled(jnp, (largest, total), centre.astype(widest))
        for divisor in divisors:
            total = total / divisor.astype(widest)
        return total.astype(dtype)

    arrays = add_state(
        *(graph, SUM, EXPONENTIALS, state, [each.x for each in terms]),
        ins=[each.names for each in terms],
        outs=[term.out(out), out],
    )
    given = [x for x in (term.c, term.d) if x is not None]
    return graph.call(result, [*arrays, *given])


def _moments(
    graph: Graph, product: _Product, dtype: Any, widest: Any
) -> Sequence[Operand]:
    terms, out = product.terms, product.out
    is_square = terms[0] == terms[1]
    different = terms[:1] if is_square else terms
    rows = [term.out(out) for term in different]
    shared = [name if all(name in row for row in rows) else None for name in out]

    def state(*values: jax.Array) -> list[jax.Array]:
        xs = [x.astype(widest) for x in values]
        axes = [term.axes(out) for term in different]
        count = math.prod(xs[0].shape[axis] for axis in axes[0])
        means, sums, away = [], [], []
        for x, gone, term in zip(xs, axes, different, strict=True):
            mean = finite(jnp, x.sum(gone, keepdims=True) / count)
            away.append(x - mean)
            means.append(term.beside(mean, out))
            sums.append(term.beside(away[-1].sum(gone, keepdims=True), out))
        products = product.total([away[0], away[-1]])
        counts = jnp.full_like(means[0] * means[-1], count)
        counts = counts[tuple(slice(None if f is not None else 1) for f in shared)]
        return [counts, *means, *sums, products]

    def result(*args: jax.Array) -> Any:
        arrays, centres = args[: -len(different)], args[-len(different) :]
        at = [
            term.beside(c, out).astype(widest)
            for term, c in zip(different, centres, strict=True)
        ]
        _, products = around(jnp, arrays, at)
        # Rounded, a sum of squares that is 0 may be a little less.
        return (jnp.maximum(products, 0) if is_square else products).astype(dtype)

    arrays = add_state(
        *(graph, SUM, MOMENTS[len(different)], state, [each.x for each in different]),
        ins=[each.names for each in different],
        outs=[shared, *rows, *rows, out],
    )
    given = [term.c for term in different if term.c is not None]
    return graph.call(result, [*arrays, *given])


def _is_float(x: Operand) -> bool:
    return bool(jnp.issubdtype(x.aval.dtype, jnp.floating))


def _unconverted(x: Operand) -> Operand:
    """The float that this is a conversion of, or itself."""
    while (node := made_by(x, p.convert_element_type_p)) and _is_float(node.ins[0]):
        [x] = node.ins
    return x


def _product_of(node: Node) -> _Product | None:
    """The product that a node sums; None if it is not one of floats."""
    if not _is_float(node.outs[0]):
        return None
    widest = wide(node.outs[0].aval.dtype)
    operands: Sequence[Operand]
    if node.primitive is p.dot_general_p:
        precision = node.params["precision"]
        if precision is not None and not isinstance(precision, tuple):
            return None  # An algorithm, which fixes the type of the sum.
        *names, out = map(tuple, dot_names(node))
        operands = node.ins
        params = {**node.params, "preferred_element_type": widest}

        def total(factors: Sequence[jax.Array]) -> jax.Array:
            pairs = zip(factors, node.ins, strict=True)
            given = [x.astype(operand.aval.dtype) for x, operand in pairs]
            [product] = bind(node, given, params)
            return product

    else:
        summed = _unconverted(node.ins[0])
        producer = summed.producer
        operands = [summed]
        if producer is not None and producer.primitive is p.mul_p:
            operands = producer.ins
        elif producer is not None and (
            producer.primitive is p.square_p
            or (producer.primitive is p.integer_pow_p and producer.params["y"] == 2)
        ):
            operands = producer.ins * 2
        every = tuple(range(len(summed.shape)))
        names = [every] * len(operands)
        out = tuple(axis for axis in every if axis not in node.params["axes"])

        def total(factors: Sequence[jax.Array]) -> jax.Array:
            product = functools.reduce(lax.mul, (x.astype(widest) for x in factors))
            return lax.reduce_sum(product, node.params["axes"])

    terms = [
        _Term(x, row)
        for x, row in zip(operands, names, strict=True)
        if isinstance(x, Value) and _is_float(x) and len(x.shape) == len(row)
    ]
    return _Product(terms, out, total) if len(terms) == len(operands) else None


def _minus(
    difference: Operand, term: _Term, out: Names, any_sign: bool = False
) -> _Term | None:
    """``x - c``, with ``c`` constant along the sum; None if it is not one.

    With ``any_sign``, ``c - x`` counts too, as in a square.
    """
    node = made_by(_unconverted(difference), p.sub_p)
    for x, c in [node.ins, node.ins[::-1]][: 1 + any_sign] if node else ():
        if not isinstance(x, Value) or x.shape != term.x.shape:
            continue
        if _is_constant(c, term.axes(out)):
            return term._replace(x=x, c=c)
    return None


def _exponential(term: _Term, out: Names) -> _Term | None:
    """``exp(x - c) / d``; None if it is not one."""
    value, divisor = _unconverted(term.x), None
    if (quotient := made_by(value, p.div_p)) and _is_constant(
        quotient.ins[1], term.axes(out)
    ):
        value, divisor = _unconverted(quotient.ins[0]), quotient.ins[1]
    node = made_by(value, p.exp_p)
    minus = _minus(node.ins[0], term, out) if node else None
    return minus and minus._replace(d=divisor, is_exponential=True)


def _is_constant(c: Operand, axes: Sequence[int]) -> bool:
    """Whether a value is constant along these axes: it has none, or of length 1."""
    if not isinstance(c, Value):
        return False
    return not c.shape or all(c.shape[axis] == 1 for axis in axes)


def place(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> Sequence[Operand] | None:
    """Writes an argmax or argmin as the place in a state."""
    [axis], dtype = node.params["axes"], node.params["index_dtype"]
    if not arg_fits(node):
        return None
    is_largest = node.primitive is p.argmax_p
    arg = lax.argmax if is_largest else lax.argmin

    def state(x: jax.Array, begin: jax.Array) -> list[jax.Array]:
        if x.dtype == bool:
            x = x.astype(jnp.uint8)
        first = lax.expand_dims(arg(x, axis, dtype), (axis,))
        best = jnp.take_along_axis(x, first, axis)
        place = first + begin.astype(dtype)
        return [lax.squeeze(each, (axis,)) for each in (best, place)]

    every = range(len(node.in_shapes[0]))
    kept = [k for k in every if k != axis]
    _, at = add_state(
        *(graph, PLACE, LARGEST if is_largest else SMALLEST, state, node.ins),
        ins=[every],
        outs=[kept, kept],
        starts=[axis],
    )
    # Behind it the place is an ordinary result, which others may combine with.
    return [barrier(graph, at)]


STAGES: dict[Any, Stages] = {p.argmax_p: place, p.argmin_p: place}
