"""Values that stages must not recompute, since what is selected of them is compared.

``y >= top_k(y)[-1]`` selects an element of ``y`` in one stage and looks for it in the
next. If that computes ``y`` again, its last bits may differ, and the element is not
found. So a stage of its own computes ``y``, unless it is as exact as the arguments.

The planner marks its own nodes that select elements by a parameter, ``selects``.
"""

from collections.abc import Mapping

from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import SPLIT, STACK, TILE, UNSTACK
from shardmap.plan.engine.nodes import Node, Operand, Value
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


def must_store(analysis: Analysis) -> dict[Value, None]:
    """The values that a stage compares with what an earlier one selected of them."""
    found: dict[Value, None] = {}
    # Value -> the values it is selected from, and whether a kept value lies in between.
    sources: dict[Operand, dict[Value, bool]] = {}

    def of(operand: Operand) -> Mapping[Value, bool]:
        own = sources.get(operand)
        return own or ({operand: False} if isinstance(operand, Value) else {})

    for node in analysis.graph.nodes:
        if node.primitive in SELECTIONS or node.params.get("selects"):
            merged: dict[Value, bool] = {}
            for operand in node.ins:
                for value, is_between in of(operand).items():
                    merged[value] = merged.get(value, False) or is_between
            for out in node.outs:
                is_kept = out in analysis.kept
                sources[out] = {v: is_kept or each for v, each in merged.items()}
        elif node.primitive in COMPARISONS:
            left, right = map(of, node.ins)
            for value in left.keys() & right.keys():
                if left[value] or right[value]:
                    if value not in analysis.kept and is_rounded(analysis, value):
                        found[value] = None
    return found


def is_rounded(analysis: Analysis, value: Value) -> bool:
    """Whether a value may get other last bits if it is computed again."""
    stack, seen = [value], {value}
    while stack:
        made = stack.pop()
        node = made.producer
        if node is None or (made in analysis.kept and made is not value):
            continue
        if not _is_exact(analysis, node):
            return True
        more = {x for x in node.ins if isinstance(x, Value)} - seen
        seen |= more
        stack += more
    return False


def _is_exact(analysis: Analysis, node: Node) -> bool:
    """Whether an equation gives the same bits in pieces of any size."""
    return analysis.rules[node.number].cheap or node.primitive in SELECTIONS
