"""Statistics of each piece of a value, and sums of products that they determine.

A reduction that follows another one of the same value reads it twice. If statistics of
each piece determine both, the first stage computes these, and the next one combines
them: see `moments` and `exponentials`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value, made_by
from shardmap.planning.lax.reduce import dot_names

SMALLER = 8
"""The statistics of all pieces must be this many times smaller than what is read."""

Names: TypeAlias = tuple[int, ...]
"""A name for each axis; axes that are multiplied with each other share one."""

Edges: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""The reduced axes in ascending order, each with the ends of its pieces."""


class Statistic(NamedTuple):
    """A statistic of each piece of a value.

    Attributes:
      size: the number of arrays that it consists of.
      of_piece: computes them from a piece, its reduced axes, and where the piece starts
        along these. The arrays keep reduced axes with length 1.
      plain: the reduction that may reduce the first array instead of the value.
      around: the term of a piece around its own statistic, of the piece and its reduced
        axes; None if no product has it.
    """

    size: int
    of_piece: Callable[..., Sequence[jax.Array]]
    plain: Any
    around: Callable[[jax.Array, Sequence[int]], jax.Array] | None = None


class Pieces(NamedTuple):
    """A value in pieces, and the statistic that is computed of each."""

    value: Value
    kind: Statistic
    edges: Edges

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, _ in self.edges)


Statistics: TypeAlias = Callable[[Pieces], Sequence[Value]]
"""Returns the arrays of a statistic of all pieces."""


class OnePass(NamedTuple):
    """A reduction that is computed from statistics.

    Attributes:
      pieces: those whose statistics it takes.
      write: adds the reduction to a graph.
    """

    pieces: Sequence[Pieces]
    write: Callable[[Graph, Statistics], Sequence[Operand]]


def piece_edges(
    analysis: Analysis, value: Value, axes: Sequence[int], smaller: int = SMALLER * 3
) -> Edges | None:
    """The pieces along reduced axes; None if they are too small, or there is one."""
    cuts = analysis.cuts[value]
    edges = [(k, (0, *cuts[k].at, value.shape[k])) for k in sorted(axes)]
    count = math.prod(len(ends) - 1 for _, ends in edges)
    size = math.prod(value.shape[axis] for axis in axes)
    return tuple(edges) if 1 < count and count * smaller <= size else None


def unmoved(x: Value, names: Names) -> tuple[Value, Names]:
    """The value that this is a transpose of, and the names of its axes."""
    node = made_by(x, p.transpose_p)
    if node is None:
        return x, names
    [source], order = node.ins, node.params["permutation"]
    if not isinstance(source, Value):
        return x, names
    return unmoved(source, tuple(names[k] for k in np.argsort(order).tolist()))


def in_names(x: jax.Array, names: Sequence[int], target: Sequence[int]) -> jax.Array:
    """A transpose whose axes have other names, with new ones of length 1."""
    x = lax.transpose(x, [names.index(name) for name in target if name in names])
    return lax.expand_dims(x, [k for k, n in enumerate(target) if n not in names])


class Term(NamedTuple):
    """An operand of a summed product: ``x``, ``x - c``, or ``exp(x - c) / d``.

    Attributes:
      x: the value.
      names: of its axes.
      kind: the statistic that replaces ``c``; None for ``x`` itself.
      c: the centre, and the names of its axes.
      d: the divisor of an exponential, and the names of its axes.
    """

    x: Value
    names: Names
    kind: Statistic | None = None
    c: tuple[Operand, Names] | None = None
    d: tuple[Operand, Names] | None = None

    def axes(self, gone: Sequence[int]) -> list[int]:
        """The axes of the value that are summed over."""
        return [self.names.index(name) for name in gone]

    def of_piece(self, x: jax.Array, gone: Sequence[int]) -> jax.Array:
        """The term of a piece, around the piece's own statistic."""
        if self.kind is None or self.kind.around is None:
            return x
        return self.kind.around(x, self.axes(gone))

    def short(
        self, array: jax.Array, given: tuple[Operand, Names] | None, gone: Sequence[int]
    ) -> jax.Array:
        """``c`` or ``d`` in the axes of the value, with summed ones of length 1."""
        if not array.ndim:
            return lax.broadcast(array, [1] * len(self.names))
        assert given is not None
        array = in_names(array, given[1], self.names)
        for axis in self.axes(gone):
            array = lax.slice_in_dim(array, 0, 1, axis=axis)
        return array


def is_constant(c: Operand, axes: Sequence[int]) -> bool:
    """Returns True if an operand is known to be constant along these axes."""
    if not isinstance(c, Value):
        return False
    if not c.shape or all(c.shape[axis] == 1 for axis in axes):
        return True
    node = made_by(c, p.broadcast_in_dim_p)
    if node is None:
        return False
    dims = node.params["broadcast_dimensions"]
    sizes = dict(zip(dims, node.in_shapes[0], strict=True))
    return all(sizes.get(axis, 1) == 1 for axis in axes)


class Product(NamedTuple):
    """A sum of products.

    Attributes:
      terms: one or two factors.
      out: the names of the axes of the result; the others are summed over.
      precision: of a ``dot_general``.
    """

    terms: Sequence[Term]
    out: Names
    precision: Any = None

    @property
    def gone(self) -> list[int]:
        return [name for name in self.terms[0].names if name not in self.out]

    @property
    def is_matrix_product(self) -> bool:
        return {*self.terms[0].names} != {*self.terms[-1].names}

    def sum(self, factors: Sequence[Any], precision: Any) -> jax.Array:
        """The sum of products of other factors with the same axes.

        A matrix product does not transpose its operands, which would copy them. Other
        products are not an einsum, which is slow on CPU.
        """
        names = [term.names for term in self.terms]
        if self.is_matrix_product:
            pairs = [x for pair in zip(factors, names, strict=True) for x in pair]
            total: jax.Array = jnp.einsum(*pairs, self.out, precision=precision)
            return total
        total = factors[0]
        for x, other in zip(factors[1:], names[1:], strict=True):
            total = total * in_names(x, other, names[0])
        left = [name for name in names[0] if name in self.out]
        axes = self.terms[0].axes(self.gone)
        return in_names(lax.reduce_sum(total, axes), left, self.out)

    def of_piece(self, *pieces: Any) -> list[jax.Array]:
        """The sum over a piece of each value, with the summed axes in front."""
        first, *others = self.terms
        factors = [first.of_piece(pieces[0], self.gone)]
        for term, x in zip(others, pieces[1:-1], strict=True):
            is_same = term.kind is first.kind and x is pieces[0]
            is_same &= {*term.axes(self.gone)} == {*first.axes(self.gone)}
            factors.append(factors[0] if is_same else term.of_piece(x, self.gone))
        total = self.sum(factors, self.precision)
        return [lax.expand_dims(total, range(len(self.gone)))]


def product_of(node: Node) -> Product | None:
    """The product that a node sums, if sums of it are kept in its own type."""
    first, *_ = operands = node.ins
    names: Sequence[Names]
    precision = None
    if node.primitive is p.dot_general_p:
        if node.params["preferred_element_type"] not in (None, first.aval.dtype):
            return None
        *names, out = map(tuple, dot_names(node))
        precision = node.params["precision"]
    elif node.primitive is p.reduce_sum_p:
        factor = first.producer
        if factor is not None and factor.primitive is p.mul_p:
            if factor.in_shapes[0] != factor.in_shapes[1]:
                return None
            operands = factor.ins
        elif factor is not None and (
            factor.primitive is p.square_p
            or (factor.primitive is p.integer_pow_p and factor.params["y"] == 2)
        ):
            operands = factor.ins * 2
        every = tuple(range(len(first.shape)))
        names = [every] * len(operands)
        out = tuple(axis for axis in every if axis not in node.params["axes"])
    else:
        return None
    terms = []
    for operand, axes in zip(operands, names, strict=True):
        dtype = operand.aval.dtype
        is_wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
        if not (isinstance(operand, Value) and is_wide and dtype == first.aval.dtype):
            return None
        terms.append(Term(operand, axes))
    return Product(terms, out, precision)
