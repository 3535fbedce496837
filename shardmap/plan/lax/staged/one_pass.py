"""Reductions in one pass: what two stages would read is read in one.

``((x - c) ** 2).sum(0)`` needs ``c``, mostly the mean of ``x``, before it can look at
``x`` again. But for every piece of ``x``, whatever its own centre ``p`` is,

    sum (x - c)(y - d)  =  sum (x - p)(y - q)  +  (p - c) sum (y - q)
                        +  sum (x - p) (q - d)  +  n (p - c)(q - d)

so that the means of a piece as ``p`` and ``q`` and three sums are all that is needed of
it for any ``c`` and ``d`` (Chan, Golub and LeVeque's formula). No difference of large
numbers is formed: what is added is small where the result is. So it is with variances
and covariances. With the largest element of a piece as ``p``,

    sum exp(x - c) y  =  sum exp(x - p) y * exp(p - c)

serves softmax, log-sum-exp, and attention. An argmax is that of the largest elements of
all pieces. A first stage takes these numbers of each piece, and the next one puts them
together. The sum or the maximum that a centre is made of is made of them too.
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

from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.lax.reduce import arg_by_parts, arg_fits, dot_names
from shardmap.plan.lax.staged.blocks import of_each_piece

ARGS = (p.argmax_p, p.argmin_p)

SMALLER = 8
"""How much smaller the numbers of all pieces are than what would be read again."""

MOST_KINDS = 2
"""How many kinds of statistics are taken of one value. Each reads the value, and two
passes do for any number of them."""

Names: TypeAlias = tuple[int, ...]
"""Of axes. Those that are multiplied with each other have one name."""

EdgesOfAxes: TypeAlias = tuple[tuple[int, ...], ...]
"""Where the pieces of each axis begin, and its end; of an axis not reduced, none."""

Writer: TypeAlias = Callable[["_Numbers"], Sequence[Operand]]


class Statistic(NamedTuple):
    """What is taken of the pieces of a value.

    Attributes:
      numbers: how many numbers are taken of each piece.
      of_piece: takes them, of a piece, the axes that are reduced, which stay with
        length 1, and where the piece starts along these.
      plain: the reductions that may as well reduce the first of these numbers.
    """

    numbers: int
    of_piece: Callable[..., Sequence[jax.Array]]
    plain: tuple[Any, ...]


def _mean(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The sum and the mean."""
    total = lax.expand_dims(lax.reduce_sum(x, axes), axes)
    count = math.prod(x.shape[axis] for axis in axes)
    return total, total / np.asarray(count, x.dtype)


def _means(x: jax.Array, axes: Sequence[int], *starts: Any) -> list[jax.Array]:
    total, mean = _mean(x, axes)
    return [total, mean, lax.expand_dims(lax.reduce_sum(x - mean, axes), axes)]


def _maxima(x: jax.Array, axes: Sequence[int], *starts: Any) -> list[jax.Array]:
    largest = jnp.max(x, axes, keepdims=True)
    return [largest, jnp.where(jnp.isfinite(largest), largest, 0)]


CENTRED = Statistic(3, _means, (p.reduce_sum_p,))
EXPONENTIAL = Statistic(2, _maxima, (p.reduce_max_p,))


@functools.cache
def _places(largest: bool, dtype: Any) -> Statistic:
    """The statistic of an argmax or argmin, of that index type."""
    arg = lax.argmax if largest else lax.argmin

    def of_piece(x: jax.Array, axes: Sequence[int], start: Any) -> list[jax.Array]:
        place = lax.expand_dims(arg(x, axes[0], dtype), axes)
        best = jnp.take_along_axis(x, place, axes[0])
        return [best, place + start.astype(dtype)]

    return Statistic(2, of_piece, (p.reduce_max_p if largest else p.reduce_min_p,))


class PieceStatistics(NamedTuple):
    """A statistic of the pieces of a value, which is no transpose."""

    value: Value
    kind: Statistic
    edges: EdgesOfAxes

    @property
    def along(self) -> tuple[Value, tuple[int, ...]]:
        return self.value, _axes(self.edges)


def _axes(edges: EdgesOfAxes) -> tuple[int, ...]:
    return tuple(axis for axis, own in enumerate(edges) if own)


class OnePass(NamedTuple):
    """A reduction that is made of statistics, and what adds it to the graph."""

    taken: Sequence[PieceStatistics]
    write: Writer


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
    found = {node: _sum(analysis, node) for node in reduced}
    found |= {node: _place(analysis, node) for node in places}
    matches = _read_less({k: match for k, match in found.items() if match is not None})
    kinds: dict[Any, PieceStatistics] = {}
    for match in matches.values():
        for each in match.taken:
            kinds.setdefault(each.along, each)
    for node in reduced:
        if node not in matches and (plain := _plain(node, kinds)) is not None:
            matches[node] = plain
    numbers = _Numbers(analysis.graph)
    made: dict[Node, Callable[[], Sequence[Operand] | None]] = {
        node: functools.partial(match.write, numbers) for node, match in matches.items()
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
        self._made: dict[PieceStatistics, Sequence[Value]] = {}

    def __call__(self, taken: PieceStatistics) -> Sequence[Value]:
        if taken not in self._made:
            kind, axes = taken.kind, _axes(taken.edges)

            def of_piece(x: jax.Array, starts: Mapping[Any, Any]) -> Sequence[Any]:
                return kind.of_piece(x, axes, *starts.values())

            every = [range(len(taken.edges))]
            self._made[taken] = of_each_piece(
                *(self.graph, of_piece, [self.graph.now(taken.value)]),
                *(
                    every,
                    every * kind.numbers,
                    {axis: taken.edges[axis] for axis in axes},
                ),
                starts=axes,
                each=4,
            )
        return self._made[taken]


def _edges(analysis: Analysis, value: Value, axes: Sequence[int]) -> EdgesOfAxes | None:
    """The pieces of reduced axes; None if they are too small, or there is one."""
    edges = tuple(
        (0, *cut.at, size) if axis in axes else ()
        for axis, (size, cut) in enumerate(
            zip(value.shape, analysis.cuts[value], strict=True)
        )
    )
    pieces = math.prod(len(edges[axis]) - 1 for axis in axes)
    whole = math.prod(value.shape[axis] for axis in axes)
    return edges if 1 < pieces and pieces * SMALLER * 3 <= whole else None


class Side(NamedTuple):
    """One of the operands whose product is summed, as a function of ``x - c``.

    Attributes:
      value: ``x``.
      names: of its axes.
      kind: the statistic; None for the operand as it is.
      centre: ``c``, and the names of its axes.
      divisor: what an exponential is divided by, and the names of its axes.
    """

    value: Value
    names: Names
    kind: Statistic | None = None
    centre: tuple[Operand, Names] | None = None
    divisor: tuple[Operand, Names] | None = None

    def axes(self, gone: Sequence[int]) -> list[int]:
        """The axes of the value that are summed over."""
        return [self.names.index(name) for name in gone]

    def is_as(self, other: "Side", gone: Sequence[int]) -> bool:
        """Whether `of_piece` makes the same of the same piece."""
        same = self.kind is other.kind
        return same and {*self.axes(gone)} == {*other.axes(gone)}

    def of_piece(self, x: jax.Array, gone: Sequence[int]) -> jax.Array:
        """A piece around its own centre, of an exponential its exponentials."""
        if self.kind is None:
            return x
        if self.kind is EXPONENTIAL:
            return jnp.exp(x - _maxima(x, self.axes(gone))[1])
        return x - _mean(x, self.axes(gone))[1]


def _unmoved(x: Value, names: Names) -> tuple[Value, Names]:
    """What a value is a transpose of, and the names of its axes."""
    while (node := x.producer) is not None and node.primitive is p.transpose_p:
        [source] = node.ins
        if not isinstance(source, Value):
            break
        x, names = source, _before(node, names)
    return x, names


def _before(transposed: Node, names: Names) -> Names:
    """The names of the axes of a transpose's operand."""
    permutation = list(transposed.params["permutation"])
    return tuple(names[permutation.index(axis)] for axis in range(len(names)))


def _side(
    operand: Value, names: Names, gone: Sequence[int], any_sign: bool = False
) -> Side:
    """An operand of a product that is summed.

    Args:
      operand: the operand.
      names: of its axes.
      gone: the names of the axes that are summed over.
      any_sign: whether ``c - x`` will do for ``x - c``.
    """
    value, now = operand, names
    divisor: tuple[Operand, Names] | None = None
    while (node := value.producer) is not None:
        axes = [now.index(name) for name in gone]
        if node.primitive is p.transpose_p:
            now = _before(node, now)
        elif node.primitive is p.div_p and divisor is None:
            if node.ins[0].shape != value.shape or not _is_same(node.ins[1], axes):
                break
            divisor = node.ins[1], now
        else:
            is_exponential = node.primitive is p.exp_p
            inner = node.ins[0] if is_exponential else value
            minus = inner.producer if isinstance(inner, Value) else None
            if minus is None or minus.primitive is not p.sub_p:
                break
            if divisor is not None and not is_exponential:
                break
            kind = EXPONENTIAL if is_exponential else CENTRED
            for x, c in [minus.ins, minus.ins[::-1]][: 1 + any_sign]:
                if isinstance(x, Value) and x.shape == value.shape:
                    if _is_same(c, axes):
                        return Side(*_unmoved(x, now), kind, (c, now), divisor)
            break
        [source, *_] = node.ins
        if not isinstance(source, Value):
            break
        value = source
    return Side(operand, names)


def _is_same(c: Operand, axes: Sequence[int]) -> bool:
    """Whether an operand is known to be the same all along these axes."""
    if not isinstance(c, Value):
        return False
    if not c.shape or all(c.shape[axis] == 1 for axis in axes):
        return True
    node = c.producer
    if node is None or node.primitive is not p.broadcast_in_dim_p or len(node.ins) > 1:
        return False
    dims = node.params["broadcast_dimensions"]
    sizes = dict(zip(dims, node.in_shapes[0], strict=True))
    return all(sizes.get(axis, 1) == 1 for axis in axes)


class _Product(NamedTuple):
    """A sum of products.

    Attributes:
      operands: what is multiplied, one or two.
      names: of their axes.
      out: of the axes of the result; the others are summed over.
      precision: of a ``dot_general``.
    """

    operands: Sequence[Operand]
    names: Sequence[Names]
    out: Names
    precision: Any = None

    @property
    def gone(self) -> list[int]:
        return [name for name in self.names[0] if name not in self.out]


def _product(node: Node) -> _Product | None:
    if node.primitive is p.dot_general_p:
        kind = node.params["preferred_element_type"]
        if kind not in (None, node.ins[0].aval.dtype):
            return None
        left, right, out = map(tuple, dot_names(node))
        return _Product(node.ins, (left, right), out, node.params["precision"])
    if node.primitive is not p.reduce_sum_p:
        return None
    [summed, *_] = node.ins
    made = summed.producer if isinstance(summed, Value) else None
    operands: Sequence[Operand] = [summed]
    if made is not None and made.primitive is p.mul_p:
        if made.in_shapes[0] != made.in_shapes[1]:
            return None
        operands = made.ins
    elif made is not None and (
        made.primitive is p.square_p
        or (made.primitive is p.integer_pow_p and made.params["y"] == 2)
    ):
        operands = [made.ins[0]] * 2
    every = tuple(range(len(summed.shape)))
    out = tuple(axis for axis in every if axis not in node.params["axes"])
    return _Product(operands, [every] * len(operands), out)


def _is_real(operand: Operand) -> bool:
    """Whether sums of it are kept in its own type."""
    dtype = operand.aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 4


def _is_early(analysis: Analysis, values: Sequence[Value], node: Node) -> bool:
    """Whether values are known a stage before the node is."""
    level = analysis.level[node.outs[0]]
    return all(analysis.level[v] < level and v not in analysis.pending for v in values)


def _sum(analysis: Analysis, node: Node) -> OnePass | None:
    """A sum of products of what is centred, or of an exponential and anything."""
    found = _product(node)
    if found is None or len({operand.aval.dtype for operand in found.operands}) > 1:
        return None
    values = [v for v in found.operands if isinstance(v, Value) and _is_real(v)]
    if len(values) < len(found.operands):
        return None
    gone, [value, *others] = found.gone, values
    is_square = others == [value] and found.names[0] == found.names[1]
    sides = [
        _side(value, names, gone, any_sign=is_square)
        for value, names in zip(values, found.names, strict=True)
    ]
    kinds = [side.kind for side in sides]
    if kinds.count(EXPONENTIAL) == 1:
        # The other one is taken as it is, whatever it is made of.
        sides = [
            side if side.kind is EXPONENTIAL else Side(value, names)
            for side, value, names in zip(sides, values, found.names, strict=True)
        ]
    elif kinds != [CENTRED, CENTRED]:
        return None
    taken = []
    edges: dict[int, tuple[int, ...]] = {}
    for side in sides:
        if side.kind is not None:
            axes = side.axes(gone)
            own = _edges(analysis, side.value, axes)
            if own is None:
                return None
            named = {side.names[axis]: own[axis] for axis in axes}
            if named != edges and edges:
                return None  # Their own statistics are of other pieces.
            edges = named
            taken.append(PieceStatistics(side.value, side.kind, own))
    read = [side.value for side in sides]
    if not _is_early(analysis, read, node):
        return None
    if {*found.names[0]} != {*found.names[-1]}:
        [out] = node.outs
        pieces = math.prod(len(own) - 1 for own in edges.values())
        kept = pieces * out.size * itemsize(out.aval)
        if kept * SMALLER > analysis.work.bytes_read(read):
            return None  # Two passes read less.
    return OnePass(taken, functools.partial(_write, found, sides, edges, taken))


def _write(
    found: _Product,
    sides: Sequence[Side],
    edges: dict[int, tuple[int, ...]],
    taken: Sequence[PieceStatistics],
    numbers: _Numbers,
) -> Sequence[Operand]:
    """Adds the products of pieces, and what puts them together."""
    graph, gone = numbers.graph, found.gone
    names = [side.names for side in sides]
    front = [*gone, *found.out]

    def of_piece(*pieces: Any) -> list[jax.Array]:
        [first, *others] = pieces[:-1]
        around = [sides[0].of_piece(first, gone)]
        for side, x in zip(sides[1:], others, strict=True):
            is_same = x is first and side.is_as(sides[0], gone)
            around.append(around[0] if is_same else side.of_piece(x, gone))
        made = _multiplied(around, names, found.out, found.precision)
        return [lax.expand_dims(made, range(len(gone)))]

    read = [graph.now(side.value) for side in sides]
    [own] = of_each_piece(graph, of_piece, read, names, [front], edges, each=2)
    centred = [side for side in sides if side.centre is not None]
    centres = [graph.now(side.centre[0]) for side in centred if side.centre]
    parts = [part for each in taken for part in numbers(each)]
    if len(taken) == 2:

        def together(products: jax.Array, c: Any, d: Any, *parts: Any) -> jax.Array:
            mean, rest, other, other_rest = (*parts[1:3], *parts[4:6])
            off = mean - _short(c, sides[0].centre, sides[0], gone)
            far = other - _short(d, sides[1].centre, sides[1], gone)
            counts = np.asarray(_counts(taken[0].edges), off.dtype)
            pairs = (rest + off * counts, far), (off, other_rest)
            high = lax.Precision.HIGHEST
            more = [_multiplied(pair, names, found.out, high) for pair in pairs]
            total = products.sum(range(len(gone))) + (more[0] + more[1])
            # Rounded, a sum of squares that is 0 may be a little less.
            return jnp.maximum(total, 0) if sides[0] == sides[1] else total

        return graph.call(together, [own, *centres, *parts])
    [side] = centred

    def weighted(products: Any, c: Any, largest: Any, own: Any, *d: Any) -> jax.Array:
        scale = jnp.exp(own - _short(c, side.centre, side, gone))
        # Of elements that are all -inf nothing is added, whatever it is scaled by.
        scale = jnp.where(largest == -jnp.inf, 0, scale)
        total = (products * _in_names(scale, side.names, front)).sum(range(len(gone)))
        for each in d:
            below = _in_names(_short(each, side.divisor, side, gone), side.names, front)
            total = total / lax.squeeze(below, range(len(gone)))
        return total

    divisor = [graph.now(side.divisor[0])] if side.divisor is not None else []
    return graph.call(weighted, [own, *centres, *parts, *divisor])


def _counts(edges: EdgesOfAxes) -> np.ndarray:
    """How many elements each piece has."""
    found = np.ones([1] * len(edges))
    for axis in _axes(edges):
        others = tuple(k for k in range(len(edges)) if k != axis)
        found = found * np.expand_dims(np.diff(edges[axis]), others)
    return found


def _multiplied(
    operands: Sequence[Any], names: Sequence[Names], out: Names, precision: Any
) -> jax.Array:
    """The sum of products over the axes that the result does not have.

    Operands are not moved if they are multiplied as matrices: copies of them would take
    memory. Elements are not, which is slow on CPU.
    """
    if {*names[0]} != {*names[-1]}:
        pairs = [x for pair in zip(operands, names, strict=True) for x in pair]
        made: jax.Array = jnp.einsum(*pairs, out, precision=precision)
        return made
    total, *others = operands
    for x, own in zip(others, names[1:], strict=True):
        total = total * _in_names(x, own, names[0])
    gone = [axis for axis, name in enumerate(names[0]) if name not in out]
    left = [name for name in names[0] if name in out]
    return _in_names(lax.reduce_sum(total, gone), left, out)


def _in_names(x: jax.Array, names: Sequence[int], target: Sequence[int]) -> jax.Array:
    """A transpose whose axes have other names, with new ones of length 1."""
    x = lax.transpose(x, [names.index(name) for name in target if name in names])
    return lax.expand_dims(x, [k for k, n in enumerate(target) if n not in names])


def _short(
    x: jax.Array, named: tuple[Operand, Names] | None, side: Side, gone: Sequence[int]
) -> jax.Array:
    """A centre or a divisor, in the axes of a side's value, those summed over short."""
    if not x.ndim:
        return lax.broadcast(x, [1] * len(side.names))
    assert named is not None
    x = _in_names(x, named[1], side.names)
    for name in gone:
        x = lax.slice_in_dim(x, 0, 1, axis=side.names.index(name))
    return x


def _in_order(graph: Graph, x: Operand, names: Names) -> Operand:
    """A transpose whose axes are in the order of their names."""
    order = [names.index(name) for name in range(len(names))]
    if order == [*range(len(order))]:
        return x
    return graph.call(lambda x: lax.transpose(x, order), [x])[0]


def _place(analysis: Analysis, node: Node) -> OnePass | None:
    """The place of an extremum."""
    [operand], [axis] = node.ins, node.params["axes"]
    if not isinstance(operand, Value) or operand.aval.dtype.kind == "b":
        return None
    value, names = _unmoved(operand, tuple(range(len(operand.shape))))
    edges = _edges(analysis, value, [names.index(axis)])
    if edges is None:
        return None
    is_largest = node.primitive is p.argmax_p
    kind = _places(is_largest, np.dtype(node.params["index_dtype"]))
    taken = PieceStatistics(value, kind, edges)

    def together(best: jax.Array, places: jax.Array) -> jax.Array:
        arg = lax.argmax if is_largest else lax.argmin
        first = lax.expand_dims(arg(best, axis, np.int32), (axis,))
        return lax.squeeze(jnp.take_along_axis(places, first, axis), (axis,))

    def write(numbers: _Numbers) -> Sequence[Operand]:
        graph = numbers.graph
        return graph.call(
            together, [_in_order(graph, x, names) for x in numbers(taken)]
        )

    return OnePass([taken], write)


def _plain(node: Node, kinds: dict[Any, PieceStatistics]) -> OnePass | None:
    """A reduction whose result is made of statistics that are taken anyway."""
    x, axes = node.ins[0], node.params.get("axes", ())
    if not isinstance(x, Value):
        return None
    value, names = _unmoved(x, tuple(range(len(x.shape))))
    taken = kinds.get((value, tuple(sorted(map(names.index, axes)))))
    if taken is None or node.primitive not in taken.kind.plain:
        return None

    def write(numbers: _Numbers) -> Sequence[Operand]:
        made = [out.aval for out in node.outs]
        first = _in_order(numbers.graph, numbers(taken)[0], names)
        return numbers.graph.add(node.primitive, node.params, [first], made)

    return OnePass([taken], write)
