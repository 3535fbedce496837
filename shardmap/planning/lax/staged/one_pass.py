"""Writes variances, softmax, covariance, attention and argmax so as to read data once.

``((x - c) ** 2).sum(0)`` needs ``c``, usually the mean of ``x``, before it can read
``x`` again. But for every piece of ``x`` and ``y``, and any numbers ``p`` and ``q``,

    sum (x - c)(y - d)  =  sum (x - p)(y - q)  +  (p - c) sum (y - q)
                        +  sum (x - p) (q - d)  +  n (p - c)(q - d)

so the means of the piece as ``p`` and ``q`` and three sums determine the result for any
``c`` and ``d`` (Chan, Golub and LeVeque). The formula does not subtract large numbers.
It gives variances and covariances. With the maximum of a piece as ``p``,

    sum exp(x - c) y  =  sum exp(x - p) y * exp(p - c)

gives softmax, log-sum-exp and attention. An argmax is the argmax over the maxima of the
pieces. The first stage computes these statistics of each piece, and the next stage
combines them. The sum or the maximum that ``c`` is made of comes from them too.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.keys import itemsize, nbytes
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value, made_by
from shardmap.planning.lax.reduce import arg_by_parts, arg_fits, dot_names
from shardmap.planning.lax.staged.barrier import barrier
from shardmap.planning.lax.staged.blocks import of_each_piece

SMALLER = 8
"""The statistics of all pieces must be this many times smaller than what is read."""

SENT = 2**16
"""The most bytes of statistics of all pieces that each shard gets."""

MOST_KINDS = 2
"""The most kinds of statistics of one value. Each kind reads the value once, and two
ordinary passes give any number of them."""

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
    """

    size: int
    of_piece: Callable[..., Sequence[jax.Array]]
    plain: Any


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


def writers(
    analysis: Analysis,
) -> dict[Node, Callable[[], Sequence[Operand] | None]]:
    """Nodes that can be computed from statistics -> what rewrites them so."""
    graph, nodes = analysis.graph, analysis.graph.nodes
    reduced = [nodes[k] for k in dict.fromkeys(r.node for r in analysis.reductions)]
    extrema = [
        node
        for node in dict.fromkeys(ended.node for ended in analysis.ended)
        if node.primitive in (p.argmax_p, p.argmin_p) and arg_fits(node)
    ]
    found = {node: _sum(analysis, node) for node in reduced}
    found |= {node: _arg(analysis, node) for node in extrema}
    kinds: dict[Any, dict[Statistic, Pieces]] = {}
    for match in found.values():
        for each in match.pieces if match else ():
            kinds.setdefault((each.value, each.axes), {})[each.kind] = each
    matches = {
        node: match
        for node, match in found.items()
        if match
        and (
            _must_be_one_pass(node)
            or all(len(kinds[x.value, x.axes]) <= MOST_KINDS for x in match.pieces)
        )
    }
    first: dict[Any, Pieces] = {}
    for match in matches.values():
        for each in match.pieces:
            first.setdefault((each.value, each.axes, each.kind.plain), each)
    for node in reduced:
        if node not in matches and (plain := _plain(node, first)):
            matches[node] = plain

    @functools.cache
    def statistics(pieces: Pieces) -> Sequence[Value]:
        value, kind, edges = pieces

        def of_piece(x: jax.Array, starts: Mapping[Any, Any]) -> Sequence[Any]:
            return kind.of_piece(x, pieces.axes, *starts.values())

        every = range(len(value.shape))
        return of_each_piece(
            *(graph, of_piece, [graph.current(value)]),
            *([every], [every] * kind.size, dict(edges)),
            starts=pieces.axes,
            each=4,
            selects=kind.plain in (p.reduce_max_p, p.reduce_min_p),
        )

    made: dict[Node, Callable[[], Sequence[Operand] | None]] = {
        node: functools.partial(arg_by_parts, graph, node) for node in extrema
    }
    for node, match in matches.items():
        made[node] = functools.partial(match.write, graph, statistics)
    return made


def _merged(graph: Graph, made: Operand, statistics: Sequence[Value]) -> Operand:
    """What statistics of all pieces are merged to, kept if they are large.

    Otherwise each shard of the next stage would get all of them.
    """
    size = sum(map(nbytes, statistics))
    is_large = isinstance(made, Value) and size > max(SENT, nbytes(made))
    return barrier(graph, made) if is_large else made


def _must_be_one_pass(node: Node) -> bool:
    """Returns True for an argmax of computed floats.

    A second pass may compute other last bits, and find nothing equal to the maximum.
    """
    is_extremum = node.primitive in (p.argmax_p, p.argmin_p)
    is_computed = node.ins[0].producer is not None
    is_float = jnp.issubdtype(node.ins[0].aval.dtype, jnp.inexact)
    return is_extremum and is_computed and is_float


def _mean(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The sum and the mean."""
    total = lax.expand_dims(lax.reduce_sum(x, axes), axes)
    count = math.prod(x.shape[axis] for axis in axes)
    return total, total / np.asarray(count, x.dtype)


def _centred(x: jax.Array, axes: Sequence[int], *starts: Any) -> list[jax.Array]:
    """The sum, the mean, and the rounding error of the mean: the sum around it."""
    total, mean = _mean(x, axes)
    return [total, mean, lax.expand_dims(lax.reduce_sum(x - mean, axes), axes)]


def _largest(x: jax.Array, axes: Sequence[int], *starts: Any) -> list[jax.Array]:
    """The maximum, and the same where it is finite."""
    largest = jnp.max(x, axes, keepdims=True)
    return [largest, jnp.where(jnp.isfinite(largest), largest, 0)]


CENTRED = Statistic(3, _centred, p.reduce_sum_p)
EXPONENTIAL = Statistic(2, _largest, p.reduce_max_p)


@functools.cache
def _extremum(is_largest: bool, dtype: Any) -> Statistic:
    """The extremum and its place, of that index type."""
    arg = lax.argmax if is_largest else lax.argmin

    def of_piece(x: jax.Array, axes: Sequence[int], start: Any) -> list[jax.Array]:
        place = lax.expand_dims(arg(x, axes[0], dtype), axes)
        best = jnp.take_along_axis(x, place, axes[0])
        return [best, place + start.astype(dtype)]

    return Statistic(2, of_piece, p.reduce_max_p if is_largest else p.reduce_min_p)


def _edges(
    analysis: Analysis, value: Value, axes: Sequence[int], smaller: int = SMALLER * 3
) -> Edges | None:
    """The pieces along reduced axes; None if they are too small, or there is one."""
    cuts = analysis.cuts[value]
    edges = [(k, (0, *cuts[k].at, value.shape[k])) for k in sorted(axes)]
    count = math.prod(len(ends) - 1 for _, ends in edges)
    size = math.prod(value.shape[axis] for axis in axes)
    return tuple(edges) if 1 < count and count * smaller <= size else None


def _unmoved(x: Value, names: Names) -> tuple[Value, Names]:
    """The value that this is a transpose of, and the names of its axes."""
    node = made_by(x, p.transpose_p)
    if node is None:
        return x, names
    [source], order = node.ins, node.params["permutation"]
    if not isinstance(source, Value):
        return x, names
    return _unmoved(source, tuple(names[k] for k in np.argsort(order).tolist()))


def _in_names(x: jax.Array, names: Sequence[int], target: Sequence[int]) -> jax.Array:
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
        if self.kind is None:
            return x
        if self.kind is EXPONENTIAL:
            return jnp.exp(x - _largest(x, self.axes(gone))[1])
        return x - _mean(x, self.axes(gone))[1]

    def short(
        self, array: jax.Array, given: tuple[Operand, Names] | None, gone: Sequence[int]
    ) -> jax.Array:
        """``c`` or ``d`` in the axes of the value, with summed ones of length 1."""
        if not array.ndim:
            return lax.broadcast(array, [1] * len(self.names))
        assert given is not None
        array = _in_names(array, given[1], self.names)
        for axis in self.axes(gone):
            array = lax.slice_in_dim(array, 0, 1, axis=axis)
        return array


def _term(plain: Term, gone: Sequence[int], any_sign: bool = False) -> Term:
    """Finds ``x - c`` or ``exp(x - c) / d`` in a factor of a product.

    Args:
      plain: the factor, as ``x`` itself. It is returned if it has neither form.
      gone: the names of the axes that are summed over.
      any_sign: whether ``c - x`` counts as ``x - c``.
    """

    def is_constant(c: Operand) -> bool:
        return _is_constant(c, [own.index(name) for name in gone])

    value, own = _unmoved(plain.x, plain.names)
    d: tuple[Operand, Names] | None = None
    if quotient := made_by(value, p.div_p):
        above, below = quotient.ins
        if isinstance(above, Value) and above.shape == value.shape:
            if is_constant(below):
                d = below, own
                value, own = _unmoved(above, own)
    exponential = made_by(value, p.exp_p)
    minus = made_by(exponential.ins[0] if exponential else value, p.sub_p)
    if minus and (exponential or d is None):
        for x, c in [minus.ins, minus.ins[::-1]][: 1 + any_sign]:
            if isinstance(x, Value) and x.shape == value.shape and is_constant(c):
                kind = EXPONENTIAL if exponential else CENTRED
                return Term(*_unmoved(x, own), kind, (c, own), d)
    return plain


def _is_constant(c: Operand, axes: Sequence[int]) -> bool:
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
            made: jax.Array = jnp.einsum(*pairs, self.out, precision=precision)
            return made
        total = factors[0]
        for x, own in zip(factors[1:], names[1:], strict=True):
            total = total * _in_names(x, own, names[0])
        left = [name for name in names[0] if name in self.out]
        axes = self.terms[0].axes(self.gone)
        return _in_names(lax.reduce_sum(total, axes), left, self.out)

    def of_piece(self, *pieces: Any) -> list[jax.Array]:
        """The sum over a piece of each value, with the summed axes in front."""
        first, *others = self.terms
        factors = [first.of_piece(pieces[0], self.gone)]
        for term, x in zip(others, pieces[1:-1], strict=True):
            is_same = term.kind is first.kind and x is pieces[0]
            is_same &= {*term.axes(self.gone)} == {*first.axes(self.gone)}
            factors.append(factors[0] if is_same else term.of_piece(x, self.gone))
        made = self.sum(factors, self.precision)
        return [lax.expand_dims(made, range(len(self.gone)))]

    def centred(
        self, edges: Edges, sums: jax.Array, c: jax.Array, d: jax.Array, *arrays: Any
    ) -> jax.Array:
        """The sum of ``(x - c)(y - d)``, from the sums around the means of pieces."""
        x, y = self.terms
        _, mean, rest, _, other, other_rest = arrays
        off = mean - x.short(c, x.c, self.gone)
        far = other - y.short(d, y.c, self.gone)
        counts = np.ones([1] * off.ndim, off.dtype)
        for axis, ends in edges:
            others = tuple(k for k in range(off.ndim) if k != axis)
            counts = counts * np.expand_dims(np.diff(ends).astype(off.dtype), others)
        pairs = (rest + off * counts, far), (off, other_rest)
        more = [self.sum(pair, lax.Precision.HIGHEST) for pair in pairs]
        total = sums.sum(range(len(self.gone))) + (more[0] + more[1])
        # Rounded, a sum of squares that is 0 may be a little less.
        return jnp.maximum(total, 0) if x == y else total

    def weighted(
        self, edges: Edges, sums: jax.Array, c: jax.Array, *arrays: jax.Array
    ) -> jax.Array:
        """The sum of ``exp(x - c) y / d``, from those around the maxima of pieces."""
        *divisor, largest, finite = arrays
        [term] = [term for term in self.terms if term.kind is not None]
        gone, front = self.gone, [*self.gone, *self.out]
        scale = jnp.exp(finite - term.short(c, term.c, gone))
        # A piece that is all -inf adds nothing, whatever it is scaled by.
        scale = jnp.where(largest == -jnp.inf, 0, scale)
        scaled = sums * _in_names(scale, term.names, front)
        total = scaled.sum(range(len(gone)))
        for d in divisor:
            below = _in_names(term.short(d, term.d, gone), term.names, front)
            total = total / lax.squeeze(below, range(len(gone)))
        return total


def _product(node: Node) -> Product | None:
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
        made = first.producer
        if made is not None and made.primitive is p.mul_p:
            if made.in_shapes[0] != made.in_shapes[1]:
                return None
            operands = made.ins
        elif made is not None and (
            made.primitive is p.square_p
            or (made.primitive is p.integer_pow_p and made.params["y"] == 2)
        ):
            operands = made.ins * 2
        every = tuple(range(len(first.shape)))
        names = [every] * len(operands)
        out = tuple(axis for axis in every if axis not in node.params["axes"])
    else:
        return None
    terms = []
    for operand, own in zip(operands, names, strict=True):
        dtype = operand.aval.dtype
        is_wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
        if not (isinstance(operand, Value) and is_wide and dtype == first.aval.dtype):
            return None
        terms.append(Term(operand, own))
    return Product(terms, out, precision)


def _sum(analysis: Analysis, node: Node) -> OnePass | None:
    """A sum of products of centred values, or of an exponential and any value."""
    product = _product(node)
    if product is None:
        return None
    gone, plain = product.gone, product.terms
    terms = [_term(each, gone, any_sign=plain[1:] == plain[:1]) for each in plain]
    kinds = [term.kind for term in terms]
    if kinds.count(EXPONENTIAL) == 1:
        # The other factor is taken as it is, whatever it is made of.
        terms = [
            term if term.kind is EXPONENTIAL else each
            for term, each in zip(terms, plain, strict=True)
        ]
    elif kinds != [CENTRED, CENTRED]:
        return None
    product = product._replace(terms=terms)
    pieces = []
    edges: dict[int, tuple[int, ...]] = {}
    for term in terms:
        if term.kind is not None:
            own = _edges(analysis, term.x, term.axes(gone))
            if own is None:
                return None
            named = {term.names[axis]: ends for axis, ends in own}
            if edges and named != edges:
                return None  # Their statistics are of different pieces.
            edges = named
            pieces.append(Pieces(term.x, term.kind, own))
    read = [term.x for term in terms]
    level = analysis.level[node.outs[0]]
    if any(analysis.level[x] >= level or x in analysis.pending for x in read):
        return None  # Nothing is known a stage earlier.
    if product.is_matrix_product:
        count = math.prod(len(ends) - 1 for ends in edges.values())
        kept = count * node.outs[0].size * itemsize(node.outs[0].aval)
        if kept * SMALLER > analysis.bytes_read(read):
            return None  # Two passes read less.

    def write(graph: Graph, statistics: Statistics) -> Sequence[Operand]:
        sums = of_each_piece(
            *(graph, product.of_piece, list(map(graph.current, read))),
            *([term.names for term in terms], [[*product.gone, *product.out]], edges),
            each=2,
        )
        given = [graph.current(term.c[0]) for term in terms if term.c]
        given += [graph.current(term.d[0]) for term in terms if term.d]
        arrays = [array for each in pieces for array in statistics(each)]
        combined = product.centred if len(pieces) == 2 else product.weighted
        combine = functools.partial(combined, pieces[0].edges)
        [made] = graph.call(combine, [*sums, *given, *arrays])
        return [_merged(graph, made, arrays)]

    return OnePass(pieces, write)


def _arg(analysis: Analysis, node: Node) -> OnePass | None:
    """An argmax or argmin."""
    [operand], [axis] = node.ins, node.params["axes"]
    if not isinstance(operand, Value) or operand.aval.dtype.kind == "b":
        return None
    every = range(len(operand.shape))
    value, names = _unmoved(operand, tuple(every))
    smaller = 1 if _must_be_one_pass(node) else SMALLER * 3
    edges = _edges(analysis, value, [names.index(axis)], smaller)
    if edges is None:
        return None
    is_largest = node.primitive is p.argmax_p
    kind = _extremum(is_largest, np.dtype(node.params["index_dtype"]))
    pieces = Pieces(value, kind, edges)

    def combined(*arrays: jax.Array) -> jax.Array:
        best, places = (_in_names(x, names, every) for x in arrays)
        arg = lax.argmax if is_largest else lax.argmin
        first = lax.expand_dims(arg(best, axis, np.int32), (axis,))
        return lax.squeeze(jnp.take_along_axis(places, first, axis), (axis,))

    def write(graph: Graph, statistics: Statistics) -> Sequence[Operand]:
        return graph.call(combined, statistics(pieces))

    return OnePass([pieces], write)


def _plain(node: Node, known: Mapping[Any, Pieces]) -> OnePass | None:
    """A sum or an extremum of a value whose statistics are computed anyway."""
    x, axes = node.ins[0], node.params.get("axes", ())
    if not isinstance(x, Value):
        return None
    every = range(len(x.shape))
    value, names = _unmoved(x, tuple(every))
    own = tuple(sorted(map(names.index, axes)))
    pieces = known.get((value, own, node.primitive))
    if pieces is None:
        return None

    def reduced(first: jax.Array) -> Sequence[jax.Array]:
        return node.primitive.bind(_in_names(first, names, every), **node.params)

    def write(graph: Graph, statistics: Statistics) -> Sequence[Operand]:
        arrays = statistics(pieces)[:1]
        [made] = graph.call(reduced, arrays)
        return [_merged(graph, made, arrays)]

    return OnePass([pieces], write)
