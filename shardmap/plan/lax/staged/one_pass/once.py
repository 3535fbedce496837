"""Reductions in one pass: what two stages would read is read in one.

``((x - c) ** 2).sum(0)`` needs ``c``, mostly the mean of ``x``, before it can look at
``x`` again. But what it needs of each piece of ``x`` depends on no ``c``, see
`statistics`: a first stage takes that, and the next one puts it together. So it is with
``exp(x - c).sum(0)`` in softmax and log-sum-exp, with an argmax, with covariances
``(x - c).T @ (y - d)``, and with attention, ``exp(x - c) @ y``. The sum or the maximum
that a centre is made of is put together of the same pieces, so that the shards that
read ``x`` make both.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut, meet
from shardmap.plan.lax.reduce import arg_by_parts, arg_fits
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
    OF_PIECES,
    SQUARES,
    EdgesOfAxes,
    Statistic,
    all_exponentials,
    all_places,
    all_squares,
    axes_of,
    constant_along,
    counts_of,
    place_of,
    short,
    unmoved,
)

ARGS = (p.argmax_p, p.argmin_p)

SMALLER = 8
"""How much smaller the numbers of all pieces are than what would be read again."""

MOST_KINDS = 2
"""How many kinds of statistics are taken of one value. Each reads the value, and two
passes do for any number of them."""

Perm = tuple[int, ...]


class PieceStatistics(NamedTuple):
    """Statistics of the pieces of a value.

    Attributes:
      value: the value, which is no transpose.
      kind: the statistic.
      edges: where the pieces of each axis lie.
    """

    value: Value
    kind: Statistic
    edges: EdgesOfAxes

    @property
    def along(self) -> tuple[Value, tuple[int, ...]]:
        return self.value, axes_of(self.edges)


class OnePass(NamedTuple):
    """A reduction that is made of statistics of pieces.

    Attributes:
      taken: the statistics.
      write: adds what puts them together to the graph.
    """

    taken: Sequence[PieceStatistics]
    write: "Callable[[_Numbers], Sequence[Operand]]"


def writers(
    analysis: Analysis,
) -> dict[Node, Callable[[], Sequence[Operand] | None]]:
    """What writes reductions in one pass, and places of extrema by parts."""
    nodes = analysis.graph.nodes
    reduced = [nodes[k] for k in dict.fromkeys(r.node for r in analysis.reductions)]
    places = [
        node
        for node in dict.fromkeys(ended.node for ended in analysis.ended)
        if node.primitive in ARGS and arg_fits(node)
    ]
    found: dict[Node, OnePass] = {}
    for node in (*reduced, *places):
        match = _place(analysis, node) if node in places else _sum(analysis, node)
        if match is not None:
            found[node] = match
    found = _read_less(found)
    kinds: dict[Any, PieceStatistics] = {}
    for match in found.values():
        for each in match.taken:
            kinds.setdefault(each.along, each)
    for node in reduced:
        if node not in found and (match := _plain(node, kinds)) is not None:
            found[node] = match
    numbers = _Numbers(analysis.graph)
    made: dict[Node, Callable[[], Sequence[Operand] | None]] = {
        node: functools.partial(match.write, numbers) for node, match in found.items()
    }
    for node in places:
        by_parts = functools.partial(arg_by_parts, analysis.graph, node)
        made.setdefault(node, by_parts)
    return made


def _read_less(found: dict[Node, OnePass]) -> dict[Node, OnePass]:
    """Those that read less than two passes."""
    kinds: dict[Any, set[Statistic]] = {}
    for match in found.values():
        for each in match.taken:
            kinds.setdefault(each.along, set()).add(each.kind)
    return {
        node: match
        for node, match in found.items()
        if all(len(kinds[each.along]) <= MOST_KINDS for each in match.taken)
    }


class _Numbers:
    """The numbers of all pieces, each made once.

    Args:
      graph: where.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[PieceStatistics, Sequence[Operand]] = {}
        self._complete: dict[tuple[PieceStatistics, int], Operand] = {}

    def __call__(self, taken: PieceStatistics, number: int, perm: Perm) -> Operand:
        """One of the numbers of all pieces, its axes in an order."""
        graph, gone = self.graph, axes_of(taken.edges)
        if taken not in self._made:
            self._made[taken] = _of_pieces(graph, taken)
        if (taken, number) not in self._complete:
            own = self._made[taken][number]
            passing = [k for k in range(len(own.shape)) if k not in gone]
            self._complete[taken, number] = barrier(graph, own, passing=passing)
        complete = self._complete[taken, number]
        if perm == tuple(range(len(perm))):
            return complete
        return graph.call(lambda x: lax.transpose(x, perm), [complete])[0]


def _of_pieces(graph: Graph, taken: PieceStatistics) -> Sequence[Operand]:
    x, kind, edges = graph.now(taken.value), taken.kind, taken.edges
    shape = tuple(
        len(own) - 1 if own else size for own, size in zip(edges, x.shape, strict=True)
    )
    # The place of an argmax is an index, all else is like the operand.
    like = jax.eval_shape(
        lambda x: kind.of_piece(x, axes_of(edges), *[0] * len(axes_of(edges))),
        jax.ShapeDtypeStruct(x.shape, x.aval.dtype),
    )
    made = [jax.core.ShapedArray(shape, each.dtype) for each in like]
    return graph.add(OF_PIECES, {"kind": kind, "edges": edges}, [x], made)


def _edges(
    shape: Sequence[int], cuts: Sequence[Cut], axes: Sequence[int]
) -> EdgesOfAxes | None:
    """The pieces of reduced axes; None if they are too small, or there is one."""
    edges = tuple(
        (0, *cuts[axis].at, size) if axis in axes else ()
        for axis, size in enumerate(shape)
    )
    pieces = math.prod(len(edges[axis]) - 1 for axis in axes)
    whole = math.prod(shape[axis] for axis in axes)
    return edges if 1 < pieces and pieces * SMALLER * 3 <= whole else None


class Side(NamedTuple):
    """An operand as a function of ``x - c``.

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


def _as_it_is(operand: Value) -> Side:
    return Side(operand, tuple(range(len(operand.shape))))


def _side(operand: Value, axes: Sequence[int], any_sign: bool = False) -> Side:
    """An operand, of which these axes are summed over.

    Args:
      operand: the operand.
      axes: the axes.
      any_sign: whether ``c - x`` will do for ``x - c``.
    """
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
            pairs = [minus.ins, minus.ins[::-1]] if any_sign else [minus.ins]
            for x, c in pairs:
                centre = constant_along(c, along)
                if centre is None or not isinstance(x, Value) or x.shape != value.shape:
                    continue
                kind = EXPONENTIALS if exponential else SQUARES
                base, of = unmoved(x)
                moved = tuple(of[axis] for axis in perm)
                return Side(base, moved, kind, (centre, perm), divisor)
            break
        value = node.ins[0]
    return _as_it_is(operand)


def _is_real(operand: Operand) -> bool:
    """Whether sums of it are kept in its own type."""
    dtype = operand.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 4


def _is_early(analysis: Analysis, values: Sequence[Value], node: Node) -> bool:
    """Whether values are known a stage before the node is."""
    level = analysis.level[node.outs[0]]
    return all(analysis.level[v] < level and v not in analysis.pending for v in values)


def _sum(analysis: Analysis, node: Node) -> OnePass | None:
    """A sum of squares, exponentials or products around centres."""
    product = _product(analysis, node)
    if product is not None or node.primitive is not p.reduce_sum_p:
        return product
    [summed], axes = node.ins, node.params["axes"]
    made = summed.producer if isinstance(summed, Value) else None
    if made is None or not _is_real(summed):
        return None
    square = made.primitive is p.square_p
    square |= made.primitive is p.integer_pow_p and made.params["y"] == 2
    square |= made.primitive is p.mul_p and made.ins[0] is made.ins[1]
    inner = made.ins[0] if square else summed
    assert isinstance(inner, Value)
    side = _side(inner, axes, any_sign=square)
    kind = SQUARES if square else EXPONENTIALS
    if side.kind is not kind or side.divisor is not None:
        return None
    own = [side.perm[axis] for axis in axes]
    edges = _edges(side.value.shape, analysis.cuts[side.value], own)
    if edges is None or not _is_early(analysis, [side.value], node):
        return None
    taken = PieceStatistics(side.value, kind, edges)

    def write(numbers: _Numbers) -> Sequence[Operand]:
        assert side.centre is not None
        centre, perm = side.centre
        counts = counts_of(tuple(edges[axis] for axis in side.perm), axes)

        def together(centre: jax.Array, *parts: jax.Array) -> jax.Array:
            centre = short(centre, perm, axes)
            if kind is SQUARES:
                return all_squares(centre, counts, axes, *parts)
            return all_exponentials(centre, axes, *parts)

        parts = [numbers(taken, k, side.perm) for k in range(1, kind.numbers)]
        return numbers.graph.call(together, [numbers.graph.now(centre), *parts])

    return OnePass([taken], write)


def _place(analysis: Analysis, node: Node) -> OnePass | None:
    """The place of an extremum."""
    [operand], [axis] = node.ins, node.params["axes"]
    if not isinstance(operand, Value) or operand.aval.dtype.kind == "b":
        return None
    value, perm = unmoved(operand)
    edges = _edges(value.shape, analysis.cuts[value], [perm[axis]])
    if edges is None:
        return None
    largest = node.primitive is p.argmax_p
    kind = place_of(largest, np.dtype(node.params["index_dtype"]))
    taken = PieceStatistics(value, kind, edges)

    def write(numbers: _Numbers) -> Sequence[Operand]:
        whole = functools.partial(all_places, largest, axis)
        return numbers.graph.call(whole, [numbers(taken, k, perm) for k in (0, 1)])

    return OnePass([taken], write)


def _plain(node: Node, kinds: dict[Any, PieceStatistics]) -> OnePass | None:
    """A reduction whose result is made of statistics that are taken anyway."""
    x, axes = node.ins[0], node.params.get("axes", ())
    if not isinstance(x, Value):
        return None
    value, perm = unmoved(x)
    taken = kinds.get((value, tuple(sorted(perm[axis] for axis in axes))))
    if taken is None or node.primitive not in taken.kind.plain:
        return None

    def write(numbers: _Numbers) -> Sequence[Operand]:
        made = [out.aval for out in node.outs]
        first = numbers(taken, 0, perm)
        return numbers.graph.add(node.primitive, node.params, [first], made)

    return OnePass([taken], write)


class _Contraction(NamedTuple):
    """A sum of products.

    Attributes:
      operands: what is multiplied.
      dims: which axes are summed over, and which go together.
      precision: of a ``dot_general``.
    """

    operands: Sequence[Operand]
    dims: Dims
    precision: Any


def _contraction(node: Node) -> _Contraction | None:
    if node.primitive is p.dot_general_p:
        kind = node.params["preferred_element_type"]
        if kind not in (None, node.ins[0].aval.dtype):
            return None
        dims = jax.tree.map(int, node.params["dimension_numbers"])
        return _Contraction(node.ins, dims, node.params["precision"])
    [summed, *_] = node.ins
    product = summed.producer if isinstance(summed, Value) else None
    if node.primitive is not p.reduce_sum_p or product is None:
        return None
    if product.primitive is not p.mul_p:
        return None
    if product.in_shapes[0] != product.in_shapes[1]:
        return None
    axes = tuple(node.params["axes"])
    rest = tuple(k for k in range(len(summed.shape)) if k not in axes)
    return _Contraction(product.ins, ((axes, axes), (rest, rest)), None)


def _product(analysis: Analysis, node: Node) -> OnePass | None:
    """A covariance, or what exponentials weigh."""
    found = _contraction(node)
    if found is None:
        return None
    a, b = found.operands
    if not (isinstance(a, Value) and isinstance(b, Value) and _is_real(a)):
        return None
    if b.aval.dtype != a.aval.dtype:
        return None
    contracted = found.dims[0]
    sides = [_side(a, contracted[0]), _side(b, contracted[1])]
    kinds = [side.kind for side in sides]
    if kinds.count(EXPONENTIALS) == 1:
        # The other one is taken as it is, whatever it is made of.
        sides = [
            side if side.kind is EXPONENTIALS else _as_it_is(v)
            for side, v in zip(sides, (a, b), strict=True)
        ]
    elif kinds != [SQUARES, SQUARES]:
        return None
    params = _params(analysis, node, found, sides)
    if params is None:
        return None
    taken: list[PieceStatistics | None] = []
    for side, axes in zip(sides, contracted, strict=True):
        own: list[tuple[int, ...]] = [()] * len(side.perm)
        for k, axis in enumerate(axes):
            size = side.value.shape[side.perm[axis]]
            own[side.perm[axis]] = params.edges if k == params.place else (0, size)
        if side.kind is None:
            taken.append(None)
            continue
        cuts = analysis.cuts[side.value]
        if tuple(own) != _edges(side.value.shape, cuts, axes_of(tuple(own))):
            return None  # Its other statistics are taken of other pieces.
        taken.append(PieceStatistics(side.value, side.kind, tuple(own)))

    def write(numbers: _Numbers) -> Sequence[Operand]:
        return _write_product(numbers, sides, params, taken)

    return OnePass([each for each in taken if each is not None], write)


def _params(
    analysis: Analysis, node: Node, found: _Contraction, sides: Sequence[Side]
) -> ProductParams | None:
    """How the products of pieces are taken; None if two passes read less."""
    [out], values = node.outs, [side.value for side in sides]
    if not _is_early(analysis, values, node):
        return None
    cuts = []
    for axes in zip(*found.dims[0], strict=True):
        pairs = zip(sides, axes, strict=True)
        cuts.append(meet([analysis.cuts[s.value][s.perm[axis]] for s, axis in pairs]))
    cut = [k for k, own in enumerate(cuts) if own.at]
    if len(cut) != 1:
        return None
    [place], [left, right] = cut, sides
    size = left.value.shape[left.perm[found.dims[0][0][place]]]
    edges = (0, *cuts[place].at, size)
    kept = (len(edges) - 1) * out.size * itemsize(out.aval)
    if kept * SMALLER > analysis.work.bytes_read(values):
        return None
    return ProductParams(
        *(found.dims, (left.perm, right.perm), (left.kind, right.kind)),
        *(place, edges, found.precision),
    )


def _write_product(
    numbers: _Numbers,
    sides: Sequence[Side],
    params: ProductParams,
    taken: Sequence[PieceStatistics | None],
) -> Sequence[Operand]:
    """Adds the products of pieces, and what puts them together."""
    graph = numbers.graph
    one = jax.eval_shape(
        functools.partial(lax.dot_general, dimension_numbers=params.dims),
        *(
            jax.ShapeDtypeStruct([s.value.shape[k] for k in s.perm], s.value.aval.dtype)
            for s in sides
        ),
    )
    made = jax.core.ShapedArray((len(params.edges) - 1, *one.shape), one.dtype)
    operands = [graph.now(side.value) for side in sides]
    [own] = graph.add(PRODUCTS, {"params": params}, operands, [made])
    products = barrier(graph, own, passing=range(1, len(made.shape)))
    own_axes = params.dims[0]
    pairs = [
        (side, each, axes)
        for side, each, axes in zip(sides, taken, own_axes, strict=True)
        if each is not None
    ]
    centres = [graph.now(side.centre[0]) for side, _, _ in pairs if side.centre]

    def shorts(centres: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            short(c, side.centre[1], axes)
            for c, (side, _, axes) in zip(centres, pairs, strict=True)
            if side.centre is not None
        ]

    if len(pairs) == 2:
        counts = np.diff(params.edges)
        for k, axis in enumerate(own_axes[0]):
            if k != params.place:
                counts = counts * sides[0].value.shape[sides[0].perm[axis]]

        def centred(products: jax.Array, *rows: jax.Array) -> jax.Array:
            return all_centred(
                *(params, counts, products, shorts(rows[:2]), rows[2:4], rows[4:])
            )

        parts = [numbers(each, k, s.perm) for k in (2, 3) for s, each, _ in pairs]
        return graph.call(centred, [products, *centres, *parts])
    [(side, each, axes)] = pairs

    def weighted(
        products: jax.Array,
        sums: jax.Array,
        own: jax.Array,
        centre: jax.Array,
        *divisor: jax.Array,
    ) -> jax.Array:
        below = None
        if side.divisor is not None:
            below = short(divisor[0], side.divisor[1], axes)
        return all_weighted(params, products, shorts([centre])[0], below, sums, own)

    parts = [numbers(each, k, side.perm) for k in (1, 2)]
    divisor = [graph.now(side.divisor[0])] if side.divisor is not None else []
    return graph.call(weighted, [products, *parts, *centres, *divisor])
