"""Values that must not be computed twice, since what is selected of them is compared.

``y >= top_k(y)[-1]`` selects an element of ``y`` in one stage and looks for it in the
next. If that computes ``y`` again, its last bits may differ, and the element is not
found. So a stage of its own computes ``y``, unless it is as exact as the arguments.

So it does if ``y.max() - y`` is computed, which is 0 for one element, and then a
function that is not continuous there or not defined below, such as a square root.

The planner marks its own nodes that select elements by a parameter, ``selects``.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax import dtypes
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import SPLIT, STACK, TILE, UNSTACK
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.lax.staged.barrier import BARRIER

COMPARISONS = frozenset({p.eq_p, p.ne_p, p.ge_p, p.gt_p, p.le_p, p.lt_p})
"""The primitives that compare elements."""

SELECTIONS = frozenset(
    {
        *(p.abs_p, p.bitcast_convert_type_p, p.broadcast_in_dim_p, p.clamp_p),
        *(p.complex_p, p.concatenate_p, p.convert_element_type_p, p.copy_p),
        *(p.cummax_p, p.cummin_p, p.dynamic_slice_p, p.imag_p, p.not_p, p.real_p),
        *(p.dynamic_update_slice_p, p.gather_p, p.max_p, p.min_p, p.neg_p, p.pad_p),
        *(p.reduce_max_p, p.reduce_min_p, p.reduce_precision_p, p.reshape_p, p.rev_p),
        *(p.reduce_window_max_p, p.reduce_window_min_p, p.scatter_max_p, p.scatter_p),
        *(p.scatter_min_p, p.select_n_p, p.slice_p, p.sort_p, p.squeeze_p, p.top_k_p),
        *(p.stop_gradient_p, p.transpose_p, p.xor_p),
        *(BARRIER, SPLIT, STACK, TILE, UNSTACK),
    }
)
"""Primitives that choose, move or round elements, or flip their sign or bits."""

# A product is not exact: fused with a sum, it is not rounded.
EXACT = SELECTIONS | {p.add_p, p.sub_p}
"""Primitives that give the same bits, whatever XLA fuses them with."""

ARITHMETIC = frozenset(
    {p.add_p, p.div_p, p.integer_pow_p, p.mul_p, p.square_p, p.sub_p}
)
"""Primitives that can give 0 or 1 for an element and what it is compared with, or that
pass this on."""

EDGES = frozenset(
    {
        *(p.acos_p, p.acosh_p, p.and_p, p.asin_p, p.atan2_p, p.atanh_p, p.ceil_p),
        *(p.digamma_p, p.erf_inv_p, p.floor_p, p.igamma_p, p.igammac_p, p.lgamma_p),
        *(p.log_p, p.log1p_p, p.polygamma_p, p.pow_p, p.regularized_incomplete_beta_p),
        *(p.rem_p, p.round_p, p.rsqrt_p, p.shift_right_arithmetic_p),
        *(p.shift_right_logical_p, p.sign_p, p.sqrt_p, p.zeta_p),
    }
)
"""Functions that are not continuous, or not defined everywhere, around 0 or 1."""


def must_store(analysis: Analysis) -> dict[Value, None]:
    """The values that a stage compares with what an earlier one selected of them."""
    found: dict[Value, None] = {}
    # Value -> the values it is selected from, and whether these are computed apart: by
    # an earlier stage, or whole, as a shard that needs a piece too computes them twice.
    sources: dict[Operand, dict[Value, bool]] = {}
    ended = {each.node for each in analysis.ended}
    # Value -> the values that what is selected of them was subtracted from, or divides.
    differences: dict[Operand, frozenset[Value]] = {}

    def of(operand: Operand) -> Mapping[Value, bool]:
        own = sources.get(operand)
        return own or ({operand: False} if isinstance(operand, Value) else {})

    def met(node: Node) -> Iterator[Value]:
        """The values that two operands are made of, one of them apart."""
        for left, right in itertools.combinations(map(of, node.ins), 2):
            for value in left.keys() & right.keys():
                if left[value] or right[value]:
                    yield value

    for node in analysis.graph.nodes:
        passed = frozenset().union(*(differences.get(x, ()) for x in node.ins))
        compared = {*passed} if _has_edge(node) else set()
        if node.primitive in COMPARISONS:
            compared.update(met(node))
        elif node.primitive in SELECTIONS or node.params.get("selects"):
            merged: dict[Value, bool] = {}
            for operand in node.ins:
                for value, is_apart in of(operand).items():
                    merged[value] = merged.get(value, False) or is_apart
            for out in node.outs:
                is_apart = out in analysis.kept or node in ended
                sources[out] = {v: is_apart or each for v, each in merged.items()}
                differences[out] = passed
        elif node.primitive in ARITHMETIC:
            differences[node.outs[0]] = passed.union(met(node))
        elif jaxprs_in(node.params) and _has_edge_inside(node):
            compared |= passed.union(met(node))
        for value in compared:
            if value not in analysis.kept and is_rounded(analysis, value):
                found[value] = None
    return found


def _has_edge(node: Node) -> bool:
    """Whether a result changes much if an operand is a little less than 0 or 1."""
    if node.primitive in COMPARISONS:
        return any(isinstance(x, Scalar) and x.value in (-1, 0, 1) for x in node.ins)
    if node.primitive is p.convert_element_type_p:
        return not _is_inexact(node.outs[0].aval)
    return node.primitive in EDGES


def _has_edge_inside(node: Node) -> bool:
    """Whether a loop or a branch compares floats, or has a function with an edge."""
    return any(
        equation.primitive in COMPARISONS | EDGES
        and _is_inexact(equation.invars[0].aval)
        for jaxpr in jaxprs_in(node.params)
        for equation in equations(jaxpr)
    )


def is_rounded(analysis: Analysis, value: Value) -> bool:
    """Whether a value may get other last bits if it is computed again."""
    stack, seen = [value], {value}
    while stack:
        made = stack.pop()
        node = made.producer
        if node is None or (made in analysis.kept and made is not value):
            continue
        if node.primitive not in EXACT and _is_inexact(made.aval):
            return True
        more = {x for x in node.ins if isinstance(x, Value)} - seen
        seen |= more
        stack += more
    return False


def _is_inexact(aval: Any) -> bool:
    """Whether a value has floats or complex numbers."""
    return bool(dtypes.issubdtype(aval.dtype, np.inexact))
