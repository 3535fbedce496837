"""Rules of reductions, argmax and ``dot_general``."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors, Local, bind
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite, made_by
from shardmap.planning.engine.rules import Cut, Factor, Reason, RuleMaker, Stages
from shardmap.planning.lax.on_cpu import reduction_of
from shardmap.planning.lax.pointwise import product

OPAQUE = Reason(
    "the reduction is a function that cannot be split",
    "use one of lax.reduce_sum, reduce_max, ...",
)

OVER_ALL = Reason(
    "the place of an extremum is found over the whole axis with partial=False, of "
    "complex numbers, and if its places do not fit into the type of its result",
    "lax.argmax with int64, and jax_enable_x64",
)


def reduced(node: Node, gone: Sequence[int], **options: Any) -> Factors:
    """``i j -> i`` for each operand; ``j`` are the reduced axes."""
    rank, count = len(node.in_shapes[0]), len(node.outs)
    out = [axis for axis in range(rank) if axis not in gone]
    # The last operands are the initial values of `lax.reduce`.
    ins: list[Any] = [range(rank)] * count + [[]] * (len(node.ins) - count)
    return Factors(node, ins, [out] * count, cheap=False, **options)


def reduction(combiner: str) -> RuleMaker:
    """``i j -> i; j combines``."""

    def passes(pending_combiner: str, pending: frozenset[int]) -> str | None:
        return combiner if pending_combiner == combiner else None

    def rule(node: Node) -> Factors:
        gone = node.params["axes"]
        contracted = dict.fromkeys(gone, combiner)

        def emitter(local: Local) -> Sequence[Any]:
            [value] = local.values
            return bind(node, [reduction_of(node, value)], node.params)

        return reduced(
            node, gone, contracted=contracted, passes=passes, emitter=emitter
        )

    return rule


def whole_reduction(axes: str, reason: Reason) -> RuleMaker:
    """``i * -> i``; the parameter ``axes`` has the reduced axes."""
    return lambda node: reduced(
        node, node.params[axes], wholes=dict.fromkeys(node.params[axes], reason)
    )


def arg_fits(node: Node) -> bool:
    """Whether an argmax can be computed from parts: its type has all places."""
    is_complex = jnp.issubdtype(node.ins[0].aval.dtype, jnp.complexfloating)
    [axis], most = node.params["axes"], np.iinfo(node.params["index_dtype"]).max
    return not is_complex and node.in_shapes[0][axis] <= most


def dot_names(node: Node) -> tuple[list[int], list[int], list[int]]:
    """Names of the axes of both operands and the result of a ``dot_general``.

    Axes that are multiplied with each other share a name.
    """
    (left_sum, right_sum), (left_batch, right_batch) = node.params["dimension_numbers"]
    rank, other = map(len, node.in_shapes)
    left, right = list(range(rank)), list(range(rank, rank + other))
    shared = *left_sum, *left_batch
    for a, b in zip(shared, (*right_sum, *right_batch), strict=True):
        right[b] = left[a]
    free = [name for name in (*left, *right) if name not in shared]
    return left, right, [*left_batch, *free]


def dot_general(node: Node) -> Factors:
    left, right, out = dot_names(node)
    [[summed, _], _] = node.params["dimension_numbers"]
    contracted: dict[Factor, str] = dict.fromkeys(summed, "add")
    return Factors(
        node,
        [left, right],
        [out],
        contracted=contracted,
        passes=functools.partial(product, node),
        cheap=False,
    )


def of_transposed(graph: Graph, node: Node) -> Sequence[Operand] | None:
    """Writes ``x.T @ v`` as a product of ``x``: XLA transposes a copy for a vector."""
    ins = list(node.ins)
    sums, batches = map(list, node.params["dimension_numbers"])
    for k, operand in enumerate(ins):
        if not (transpose := made_by(operand, p.transpose_p)):
            continue
        order = transpose.params["permutation"]
        shared = *sums[k], *batches[k]
        free = [at for axis, at in enumerate(order) if axis not in shared]
        if free == sorted(free):
            [ins[k]] = transpose.ins
            sums[k] = tuple(order[axis] for axis in sums[k])
            batches[k] = tuple(order[axis] for axis in batches[k])
    if ins == [*node.ins]:
        return None
    params = {**node.params, "dimension_numbers": (tuple(sums), tuple(batches))}
    return graph.add(node.primitive, params, ins, [node.outs[0].aval])


def wide(dtype: Any) -> Any:
    """The dtype in which sums are computed: float32 for small floats."""
    small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if small else dtype


def wide_sum(
    graph: Graph, node: Node, cuts: Sequence[Sequence[Cut]]
) -> list[Operand] | None:
    """Sums small floats in float32 and rounds once, as XLA does."""
    params, dtype = dict(node.params), node.outs[0].aval.dtype
    if (widest := wide(dtype)) == dtype:
        return None
    is_product = "preferred_element_type" in params
    if is_product:
        if not isinstance(params["precision"], tuple | None):
            return None  # An algorithm, which fixes the type of the sum.
        params["preferred_element_type"] = widest

    def summed(*operands: jax.Array) -> Any:
        if not is_product:
            operands = tuple(x.astype(widest) for x in operands)
        return node.primitive.bind(*operands, **params).astype(dtype)

    return graph.call(summed, node.ins)


REWRITES: dict[Any, Rewrite] = {p.dot_general_p: of_transposed}
"""Products read transposed operands without a copy."""

STAGES: dict[Any, Stages] = {
    p.conv_general_dilated_p: wide_sum,
    p.dot_general_p: wide_sum,
    p.reduce_sum_p: wide_sum,
}
"""How sums over a cut axis are rewritten."""

COMBINERS = {
    p.reduce_and_p: "and",
    p.reduce_max_p: "max",
    p.reduce_min_p: "min",
    p.reduce_or_p: "or",
    p.reduce_prod_p: "mul",
    p.reduce_sum_p: "add",
    p.reduce_xor_p: "xor",
}
"""The reductions whose parts combine, in any order."""

RULES: dict[Any, RuleMaker] = {
    **dict.fromkeys([p.argmax_p, p.argmin_p], whole_reduction("axes", OVER_ALL)),
    p.dot_general_p: dot_general,
    p.reduce_p: whole_reduction("dimensions", OPAQUE),
    **{primitive: reduction(combiner) for primitive, combiner in COMBINERS.items()},
}
