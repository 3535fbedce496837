"""Values that must not be computed twice, since what is selected of them is compared.

``y >= top_k(y)[-1]`` selects an element of ``y`` in one stage and looks for it in the
next. If that computed ``y`` again, its last bits could differ, and the element would
not be found. So where a comparison, or a function that is not continuous or not defined
somewhere, takes ``y`` together with what an earlier stage selected of it, a stage of
its own computes and keeps ``y``, unless it is as exact as the arguments.

The planner marks its own nodes that select elements by a parameter, ``selects``.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from jax import dtypes
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import (
    OPTIMIZATION_BARRIER,
    SPLIT,
    STACK,
    TILE,
    UNSTACK,
)
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.nodes import Node, Operand, Value
from shardmap.planning.lax import pointwise
from shardmap.planning.lax.staged.barrier import BARRIER

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
        *(BARRIER, OPTIMIZATION_BARRIER, SPLIT, STACK, TILE, UNSTACK),
    }
)
"""Primitives that choose, move or round elements, or flip their sign or bits."""

# A product is not exact: fused with a sum, it is not rounded.
EXACT = SELECTIONS | {p.add_p, p.sub_p}
"""Primitives that give the same bits, whatever XLA fuses them with."""

DECISIONS = frozenset(
    {
        *(p.eq_p, p.ne_p, p.ge_p, p.gt_p, p.le_p, p.lt_p),
        *(p.acos_p, p.acosh_p, p.and_p, p.asin_p, p.atan2_p, p.atanh_p, p.ceil_p),
        *(p.digamma_p, p.erf_inv_p, p.floor_p, p.igamma_p, p.igammac_p, p.lgamma_p),
        *(p.log1p_p, p.log_p, p.polygamma_p, p.pow_p, p.regularized_incomplete_beta_p),
        *(p.rem_p, p.round_p, p.rsqrt_p, p.shift_right_arithmetic_p),
        *(p.shift_right_logical_p, p.sign_p, p.sqrt_p, p.zeta_p),
    }
)
"""Comparisons, and functions that last bits may take over an edge."""

ORDERS = frozenset(
    {
        *(p.cummax_p, p.cummin_p, p.dynamic_slice_p, p.gather_p, p.reduce_max_p),
        *(p.reduce_min_p, p.reduce_window_max_p, p.reduce_window_min_p, p.slice_p),
        *(p.scatter_max_p, p.scatter_min_p, p.sort_p, p.top_k_p),
    }
)
"""Primitives whose results are some of the elements of an axis."""

Values = frozenset[Value]
NONE: Values = frozenset()


def must_store(analysis: Analysis) -> dict[Value, None]:
    """The values that a stage decides on with what an earlier one selected of them."""
    decided = _decided_on(analysis, {})
    # Storing them moves what is made of them to later stages.
    return _decided_on(analysis, decided) if decided else decided


def _decided_on(analysis: Analysis, stored: Collection[Value]) -> dict[Value, None]:
    """As `must_store`.

    Args:
      stored: in what is made of these, all that was selected counts as earlier.
    """
    kept = analysis.kept
    ended = {each.node for each in analysis.ended}
    decided: dict[Value, None] = {}
    # Of which values an operand has selected elements, also by any or an earlier stage.
    selected: dict[Operand, Values] = {}
    ever: dict[Operand, Values] = {}
    earlier: dict[Operand, Values] = {}
    moved: set[Operand] = set(stored)
    for node in analysis.graph.nodes:
        before = NONE.union(*(earlier.get(x, NONE) for x in node.ins))
        if not moved.isdisjoint(node.ins):
            moved.update(node.outs)
            before = before.union(*(ever.get(x, NONE) for x in node.ins))
        if before and _decides(node):
            taken = before & _taken_with(analysis, node)
            decided |= dict.fromkeys(v for v in taken if is_rounded(analysis, v))
        if not _is_elementwise(node) and not _selects(node):
            continue
        of = NONE.union(*(selected.get(x, NONE) for x in node.ins))
        if node.primitive in ORDERS or node.params.get("selects"):
            of |= _sources(node)
        for out in node.outs:
            selected[out] = of
            # Shards compute pieces again of what they take whole.
            is_earlier = out in kept or node in ended
            earlier[out] = before | of if is_earlier else before
            ever[out] = of.union(before, *(ever.get(x, NONE) for x in node.ins))
    return decided


def _is_elementwise(node: Node) -> bool:
    return node.primitive in pointwise.RULES


def _selects(node: Node) -> bool:
    return node.primitive in SELECTIONS or bool(node.params.get("selects"))


def _decides(node: Node) -> bool:
    """Whether last bits of its operands may change all of its results."""
    if node.primitive is p.convert_element_type_p:
        return _is_inexact(node.ins[0].aval) and not _is_inexact(node.outs[0].aval)
    if node.primitive is p.integer_pow_p:
        return bool(node.params["y"] < 0)
    if node.primitive is p.div_p or node.primitive in DECISIONS:
        return True
    return any(
        equation.primitive in DECISIONS
        for jaxpr in jaxprs_in(node.params)
        for equation in equations(jaxpr)
    )


def _sources(node: Node) -> Values:
    """The computed values of which a node, or those before it, select elements."""
    sources = set()
    stack = [x for x in node.ins if isinstance(x, Value)]
    for value in stack:
        producer = value.producer
        if producer is not None and _selects(producer):
            stack += [
                x for x in producer.ins if isinstance(x, Value) and x not in stack
            ]
        elif producer is not None and _is_inexact(value.aval):
            sources.add(value)
    return frozenset(sources)


def _taken_with(analysis: Analysis, node: Node) -> Values:
    """The values that its stage computes again, element by element, for a node."""
    operands = node.ins[1:] if node.primitive is p.div_p else node.ins
    stack = [x for x in operands if isinstance(x, Value)]
    seen = set(stack)
    computed = set()
    while stack:
        value = stack.pop()
        if value in analysis.kept:
            continue
        computed.add(value)
        producer = value.producer
        if producer is not None and (_is_elementwise(producer) or _selects(producer)):
            more = {x for x in producer.ins if isinstance(x, Value)} - seen
            seen |= more
            stack += more
    return frozenset(computed)


def is_rounded(analysis: Analysis, value: Value) -> bool:
    """Whether a value may get other last bits if it is computed again."""
    stack, seen = [value], {value}
    while stack:
        each = stack.pop()
        node = each.producer
        if node is None or (each in analysis.kept and each is not value):
            continue
        if node.primitive not in EXACT and _is_inexact(each.aval):
            return True
        more = {x for x in node.ins if isinstance(x, Value)} - seen
        seen |= more
        stack += more
    return False


def _is_inexact(aval: Any) -> bool:
    """Whether a value has floats or complex numbers."""
    return bool(dtypes.issubdtype(aval.dtype, np.inexact))
