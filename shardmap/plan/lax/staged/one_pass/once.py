"""Statistics in one pass: what two stages would read is read in one.

``((x - c) ** 2).sum(0)`` needs ``c``, mostly the mean of ``x``, before it can look at
``x`` again. But what it needs of each piece of ``x`` depends on no ``c``, see
`statistics`: a first stage takes that, and the next one puts it together. So it is with
``exp(x - c).sum(0)`` in softmax and log-sum-exp, and with an argmax. The sum or the
maximum that a centre is made of is put together of the same pieces, so that the shards
that read ``x`` make both.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap.plan.engine.nodes import Graph, Node, Operand, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.rules import Cut
from shardmap.plan.lax.reduce import arg_by_parts, arg_fits
from shardmap.plan.lax.staged.barrier import barrier
from shardmap.plan.lax.staged.one_pass import contractions
from shardmap.plan.lax.staged.one_pass.contractions import Product
from shardmap.plan.lax.staged.one_pass.products import ProductParams
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
    moved,
    place_of,
    short,
    unmoved,
)

ARGS = (p.argmax_p, p.argmin_p)

SMALLER = 8
"""How much smaller than their operand the statistics of all pieces are at least."""


class Change(NamedTuple):
    """A reduction that is written as one of pieces.

    Attributes:
      node: the reduction.
      kind: the statistic.
      edges: where the pieces lie.
      along: the values that statistics are taken of, with the reduced axes.
      products: if it is a sum of products, how those of pieces are taken.
      plain: whether it reduces the first of the numbers of pieces, as it is.
    """

    node: Node
    kind: Statistic
    edges: EdgesOfAxes
    along: "Sequence[Along]" = ()
    products: ProductParams | None = None
    plain: bool = False


class Found(NamedTuple):
    """A sum that can be taken in one pass.

    Attributes:
      kind: the statistic.
      operand: ``x``.
      centre: ``c``.
    """

    kind: Statistic
    operand: Value
    centre: Operand


def _recognised(summed: Operand, axes: Sequence[int]) -> Found | None:
    """What is summed, if it is a function of ``x - c``, and ``c`` is one number."""
    dtype = summed.aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 4:
        return None
    node = summed.producer if isinstance(summed, Value) else None
    if node is None:
        return None
    difference = node.ins[0]
    square = node.primitive is p.square_p
    square |= node.primitive is p.integer_pow_p and node.params["y"] == 2
    square |= node.primitive is p.mul_p and node.ins[0] is node.ins[1]
    if not (square or node.primitive is p.exp_p):
        return None
    minus = difference.producer if isinstance(difference, Value) else None
    if minus is None or minus.primitive is not p.sub_p:
        return None
    kind = SQUARES if square else EXPONENTIALS
    pairs = [minus.ins, minus.ins[::-1]] if square else [minus.ins]
    for x, c in pairs:
        same = isinstance(x, Value) and x.shape == summed.shape
        if same and (centre := constant_along(c, axes)) is not None:
            assert isinstance(x, Value)
            return Found(kind, x, centre)
    return None


MOST_KINDS = 2
"""Of how many kinds statistics of one value are: each is read for on its own, and two
passes do for any number."""


Along = tuple[Value, tuple[int, ...]]
"""Axes of a value that is no transpose."""


def _along(x: Value, axes: Sequence[int]) -> Along:
    x, perm = unmoved(x)
    return x, tuple(sorted(perm[axis] for axis in axes))


class _Changes:
    """What is found of an analysis.

    Attributes:
      found: the reductions to take in one pass.
      kinds: which statistics of values these take, the first one first.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.found: dict[Node, Change] = {}
        self.kinds: dict[Along, dict[Statistic, None]] = {}

    def _edges(self, x: Value, axes: Sequence[int]) -> EdgesOfAxes | None:
        return edges_of(x.shape, self.analysis.cuts[x], axes)

    def add(self, node: Node, kind: Statistic, x: Value) -> None:
        axes = tuple(node.params["axes"])
        edges = self._edges(x, axes)
        if edges is not None:
            along = _along(x, axes)
            self.found[node] = Change(node, kind, edges, (along,))
            self.kinds.setdefault(along, {})[kind] = None

    def add_product(self, node: Node, product: Product) -> None:
        params = contractions.params_of(self.analysis, node, product)
        if params is None:
            return
        every = contractions.edges_of_sides(product, params)
        own = []
        for side, edges in zip(product.sides, every, strict=True):
            if side.kind is None or edges is None:
                continue
            if edges != self._edges(side.value, axes_of(edges)):
                return  # Its other statistics are taken of other pieces.
            own.append((_along(side.value, axes_of(edges)), side.kind, edges))
        for key, kind, edges in own:
            self.kinds.setdefault(key, {})[kind] = None
            along = [each for each, _, _ in own]
            self.found[node] = Change(node, kind, edges, along, params)

    def add_sum(self, node: Node) -> None:
        product = contractions.recognised(node.primitive, node.params, node.ins)
        if product is not None:
            self.add_product(node, product)
        if node.primitive is not p.reduce_sum_p:
            return
        if (sum_ := _recognised(node.ins[0], node.params["axes"])) is None:
            return
        x, level = sum_.operand, self.analysis.level
        # Else all of it is known at once, and nothing is to be gained.
        if level[x] < level[node.outs[0]] and x not in self.analysis.pending:
            self.add(node, sum_.kind, x)

    def add_place(self, node: Node) -> None:
        if node.primitive in ARGS and isinstance(operand := node.ins[0], Value):
            dtype = operand.aval.dtype
            if arg_fits(node) and dtype.kind != "b":
                index = np.dtype(node.params["index_dtype"])
                largest = node.primitive is p.argmax_p
                self.add(node, place_of(largest, index), operand)

    def leave_out(self) -> None:
        """Leaves out values of which so much is taken that two passes read less."""
        many = {key for key, kinds in self.kinds.items() if len(kinds) > MOST_KINDS}
        self.found = {
            node: change
            for node, change in self.found.items()
            if many.isdisjoint(change.along)
        }
        taken = {key for change in self.found.values() for key in change.along}
        self.kinds = {key: self.kinds[key] for key in self.kinds if key in taken}

    def add_plain(self, node: Node) -> None:
        """Adds a reduction whose result is made of statistics that are taken anyway."""
        x, axes = node.ins[0], tuple(node.params.get("axes", ()))
        if not isinstance(x, Value) or _along(x, axes) not in self.kinds:
            return
        kind, edges = next(iter(self.kinds[_along(x, axes)])), self._edges(x, axes)
        if node.primitive in kind.plain and edges is not None:
            change = Change(node, kind, edges, plain=True)
            self.found.setdefault(node, change)


def changes(analysis: Analysis) -> dict[Node, Change]:
    """The reductions to take in one pass."""
    nodes = analysis.graph.nodes
    reduced = [nodes[k] for k in dict.fromkeys(r.node for r in analysis.reductions)]
    made = _Changes(analysis)
    for node in reduced:
        made.add_sum(node)
    for node in dict.fromkeys(ended.node for ended in analysis.ended):
        made.add_place(node)
    made.leave_out()
    for node in reduced:
        made.add_plain(node)
    return made.found


def edges_of(
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


def writers(
    analysis: Analysis,
) -> dict[Node, Callable[[], Sequence[Operand] | None]]:
    """What writes reductions in one pass, and places of extrema by parts."""
    graph, chosen = analysis.graph, changes(analysis)
    writer = _Writer(graph)
    made: dict[Node, Callable[[], Sequence[Operand] | None]] = {
        node: functools.partial(writer.write, change) for node, change in chosen.items()
    }
    for node in dict.fromkeys(ended.node for ended in analysis.ended):
        if node.primitive in ARGS and node not in made and arg_fits(node):
            made[node] = functools.partial(arg_by_parts, graph, node)
    return made


class _Writer:
    """Writes reductions by the numbers of all pieces, which are made once.

    Args:
      graph: where.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[Any, Sequence[Operand]] = {}
        self._complete: dict[Operand, Operand] = {}

    def write(self, change: Change) -> Sequence[Operand] | None:
        node = change.node
        if node.primitive in ARGS:
            return self._place(change)
        if change.products is not None:
            found = contractions.recognised(node.primitive, node.params, node.ins)
            if found is not None:
                return contractions.write(
                    self._graph, found, change.products, self._parts
                )
        if not change.plain:
            axes = node.params["axes"]
            if (known := _recognised(node.ins[0], axes)) is not None:
                return self._in_one_pass(change, known)
            return None
        first = self._parts(node.ins[0], change.kind, change.edges)(0)
        out = [out.aval for out in node.outs]
        return self._graph.add(node.primitive, node.params, [first], out)

    def _parts(
        self, x: Operand, kind: Statistic, edges: EdgesOfAxes
    ) -> Callable[[int], Operand]:
        """Gives the numbers of all pieces."""
        assert isinstance(x, Value)
        graph = self._graph
        of, perm = unmoved(x)
        edges = tuple(edges[perm.index(axis)] for axis in range(len(perm)))
        key = of, kind, edges
        if key not in self._made:
            self._made[key] = _of_pieces(graph, of, kind, edges)

        def part(k: int) -> Operand:
            own = self._made[key][k]
            if own not in self._complete:
                gone = axes_of(edges)
                passing = [k for k in range(len(own.shape)) if k not in gone]
                self._complete[own] = barrier(graph, own, passing=passing)
            return moved(graph, self._complete[own], perm)

        return part

    def _in_one_pass(self, change: Change, known: Found) -> Sequence[Operand]:
        axes = change.node.params["axes"]
        part = self._parts(known.operand, known.kind, change.edges)
        counts = counts_of(change.edges, axes)
        numbers = range(1, known.kind.numbers)

        def together(centre: jax.Array, *parts: jax.Array) -> jax.Array:
            centre = short(centre, range(len(known.operand.shape)), axes)
            if known.kind is SQUARES:
                return all_squares(centre, counts, axes, *parts)
            return all_exponentials(centre, axes, *parts)

        return self._graph.call(together, [known.centre, *map(part, numbers)])

    def _place(self, change: Change) -> Sequence[Operand]:
        [axis] = change.node.params["axes"]
        largest = change.node.primitive is p.argmax_p
        part = self._parts(change.node.ins[0], change.kind, change.edges)
        whole = functools.partial(all_places, largest, axis)
        return self._graph.call(whole, [part(0), part(1)])


def _of_pieces(
    graph: Graph, x: Operand, kind: Statistic, edges: EdgesOfAxes
) -> Sequence[Operand]:
    """The numbers of all pieces."""
    shape = tuple(
        len(own) - 1 if own else size for own, size in zip(edges, x.shape, strict=True)
    )
    params = {"kind": kind, "edges": edges}
    # The place of an argmax is an index, all else is like the operand.
    like = jax.eval_shape(
        lambda x: kind.of_piece(x, axes_of(edges), *[0] * len(axes_of(edges))),
        jax.ShapeDtypeStruct(x.shape, x.aval.dtype),
    )
    made = [jax.core.ShapedArray(shape, each.dtype) for each in like]
    return graph.add(OF_PIECES, params, [x], made)
