"""Applies a function to each piece of a value, in a stage of its own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardmap.planning.engine.nodes import Graph, Operand, PlanPrimitive, Value
from shardmap.planning.engine.pieces import of_pieces
from shardmap.planning.engine.rules import MANY, Factor, Reason, RuleMaker
from shardmap.planning.lax.staged.barrier import barrier

PIECES = PlanPrimitive("pieces")
"""A function of pieces. The parameter ``rule`` makes its rule."""


def of_each_piece(
    graph: Graph,
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Operand],
    ins: Sequence[Sequence[Factor]],
    outs: Sequence[Sequence[Factor]],
    edges: Mapping[Any, tuple[int, ...]],
    starts: Sequence[Factor] = (),
    wholes: Mapping[Factor, Reason] | None = None,
    each: int = MANY,
) -> list[Value]:
    """Adds a function of each piece to a graph, and a barrier after each result.

    Args:
      graph: the graph.
      function: gets the pieces of the operands, and where they start by factor. Its
        results have length 1 along the axes in pieces.
      operands: its operands.
      ins: the factors of their axes.
      outs: the factors of the axes of results.
      edges: by factor, the ends of the pieces.
      starts: the factors whose starts the function gets.
      wholes: the factors that are never cut.
      each: the approximate number of operations per element.

    Returns:
      The results of all pieces. Cuts of axes that are not in pieces pass.
    """
    wholes = wholes or {}
    pieces = [
        jax.ShapeDtypeStruct(
            [
                edges[f][1] if f in edges else size
                for f, size in zip(row, operand.shape, strict=True)
            ],
            operand.aval.dtype,
        )
        for operand, row in zip(operands, ins, strict=True)
    ]
    places = {f: jax.ShapeDtypeStruct((), "int32") for f in starts}
    avals = [
        jax.core.ShapedArray(
            tuple(
                len(edges[f]) - 1 if f in edges else size
                for f, size in zip(row, aval.shape, strict=True)
            ),
            aval.dtype,
        )
        for aval, row in zip(
            jax.eval_shape(function, *pieces, places), outs, strict=True
        )
    ]
    rule = functools.partial(
        of_pieces,
        ins=ins,
        outs=outs,
        edges=edges,
        function=function,
        starts=starts,
        wholes=wholes,
        each=each,
    )
    params = {"rule": rule}
    stopped = {*edges, *wholes}
    return [
        barrier(
            graph, result, passing=[k for k, f in enumerate(row) if f not in stopped]
        )
        for result, row in zip(
            graph.add(PIECES, params, operands, avals), outs, strict=True
        )
    ]


def edges_of(points: Sequence[int], size: int, least: int) -> tuple[int, ...]:
    """The ends of pieces that have at least ``least`` elements each."""
    edges = [0]
    for point in points:
        if point - edges[-1] >= least > 0 and size - point >= least:
            edges.append(point)
    return (*edges, size)


RULES: dict[Any, RuleMaker] = {PIECES: lambda node: node.params["rule"](node)}
