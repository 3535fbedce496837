"""Writes variances, softmax, covariance, attention and argmax so as to read data once.

The first stage computes statistics of each piece, and the next stage combines them:
`moments`, `exponentials` and `extrema` say how. Sums and maxima of the same value, of
which a centre is made, come from the statistics too.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import primitives as p

from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.keys import itemsize, nbytes
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value
from shardmap.planning.lax.reduce import arg_by_parts, arg_fits
from shardmap.planning.lax.staged import exponentials, extrema, moments
from shardmap.planning.lax.staged.barrier import barrier
from shardmap.planning.lax.staged.blocks import of_each_piece
from shardmap.planning.lax.staged.exponentials import EXPONENTIAL
from shardmap.planning.lax.staged.moments import CENTRED
from shardmap.planning.lax.staged.statistics import (
    SMALLER,
    OnePass,
    Pieces,
    Statistic,
    Statistics,
    in_names,
    piece_edges,
    product_of,
    unmoved,
)

SENT = 2**16
"""The most bytes of statistics of all pieces that each shard gets."""

MOST_KINDS = 2
"""The most kinds of statistics of one value. Each kind reads the value once, and two
ordinary passes give any number of them."""


def writers(
    analysis: Analysis,
) -> dict[Node, Callable[[], Sequence[Operand] | None]]:
    """Nodes that can be computed from statistics -> what rewrites them so."""
    graph, nodes = analysis.graph, analysis.graph.nodes
    reduced = [nodes[k] for k in dict.fromkeys(r.node for r in analysis.reductions)]
    places = [
        node
        for node in dict.fromkeys(ended.node for ended in analysis.ended)
        if node.primitive in (p.argmax_p, p.argmin_p) and arg_fits(node)
    ]
    candidates = {node: _sum(analysis, node) for node in reduced}
    candidates |= {node: extrema.place(analysis, node) for node in places}
    kinds: dict[Any, dict[Statistic, Pieces]] = {}
    for match in candidates.values():
        for each in match.pieces if match else ():
            kinds.setdefault((each.value, each.axes), {})[each.kind] = each
    matches = {
        node: match
        for node, match in candidates.items()
        if match
        and (
            extrema.must_be_one_pass(node)
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
            graph,
            of_piece,
            [graph.current(value)],
            ins=[every],
            outs=[every] * kind.size,
            edges=dict(edges),
            starts=pieces.axes,
            each=4,
        )

    rewrites: dict[Node, Callable[[], Sequence[Operand] | None]] = {
        node: functools.partial(arg_by_parts, graph, node) for node in places
    }
    for node, match in matches.items():
        rewrites[node] = functools.partial(match.write, graph, statistics)
    return rewrites


def _merged(graph: Graph, result: Operand, statistics: Sequence[Value]) -> Operand:
    """What statistics of all pieces are merged to, kept if they are large.

    Otherwise each shard of the next stage would get all of them.
    """
    size = sum(map(nbytes, statistics))
    is_large = isinstance(result, Value) and size > max(SENT, nbytes(result))
    return barrier(graph, result) if is_large else result


def _sum(analysis: Analysis, node: Node) -> OnePass | None:
    """A sum of products of centred values, or of an exponential and any value."""
    product = product_of(node)
    if product is None:
        return None
    gone, plain = product.gone, product.terms
    is_square = plain[1:] == plain[:1]
    terms = [
        exponentials.exponential(each, gone)
        or moments.centred(each, gone, any_sign=is_square)
        or each
        for each in plain
    ]
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
            ends_of_pieces = piece_edges(analysis, term.x, term.axes(gone))
            if ends_of_pieces is None:
                return None
            named = {term.names[axis]: ends for axis, ends in ends_of_pieces}
            if edges and named != edges:
                return None  # Their statistics are of different pieces.
            edges = named
            pieces.append(Pieces(term.x, term.kind, ends_of_pieces))
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
            graph,
            product.of_piece,
            list(map(graph.current, read)),
            ins=[term.names for term in terms],
            outs=[[*product.gone, *product.out]],
            edges=edges,
            each=2,
        )
        given = [graph.current(term.c[0]) for term in terms if term.c]
        given += [graph.current(term.d[0]) for term in terms if term.d]
        arrays = [array for each in pieces for array in statistics(each)]
        how = moments if len(pieces) == 2 else exponentials
        combine = functools.partial(how.combined, product, pieces[0].edges)
        [total] = graph.call(combine, [*sums, *given, *arrays])
        return [_merged(graph, total, arrays)]

    return OnePass(pieces, write)


def _plain(node: Node, known: Mapping[Any, Pieces]) -> OnePass | None:
    """A sum or an extremum of a value whose statistics are computed anyway."""
    x, axes = node.ins[0], node.params.get("axes", ())
    if not isinstance(x, Value):
        return None
    every = range(len(x.shape))
    value, names = unmoved(x, tuple(every))
    reduced_axes = tuple(sorted(map(names.index, axes)))
    pieces = known.get((value, reduced_axes, node.primitive))
    if pieces is None:
        return None

    def reduced(first: jax.Array) -> Sequence[jax.Array]:
        return node.primitive.bind(in_names(first, names, every), **node.params)

    def write(graph: Graph, statistics: Statistics) -> Sequence[Operand]:
        arrays = statistics(pieces)[:1]
        [result] = graph.call(reduced, arrays)
        return [_merged(graph, result, arrays)]

    return OnePass([pieces], write)
