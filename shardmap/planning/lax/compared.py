"""Values that must not be computed twice, since they are compared with parts of them.

``y >= top_k(y)[-1]`` selects an element of ``y`` in one stage and looks for it in the
next. If that computed ``y`` again, its last bits could differ, and the element would
not be found. So where a comparison, or a function that is not continuous or not defined
somewhere, takes ``y`` together with what an earlier stage made of it, other than a sum,
a stage of its own computes and keeps ``y``.
"""

from collections.abc import Iterable, Mapping

from jax.extend.core import primitives as p

from shardmap._jax.types import is_inexact
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.planning.engine.analysis import Analysis
from shardmap.planning.engine.nodes import Node, Operand, Value
from shardmap.planning.lax import pointwise, shape
from shardmap.planning.lax.staged import monoids

MOVES = frozenset({*shape.RULES, p.gather_p, p.reshape_p})
"""Primitives whose results are elements of their operands."""

EXACT = frozenset(
    {
        *(p.abs_p, p.add_p, p.clamp_p, p.convert_element_type_p, p.copy_p),
        *(p.max_p, p.min_p, p.neg_p, p.select_n_p, p.sub_p, *MOVES),
    }
)
"""Primitives that give the same bits, whatever XLA fuses them with.

A product is not exact: fused with a sum, it is not rounded."""

SUMS = frozenset(
    {
        *(p.conv_general_dilated_p, p.cumsum_p, p.dot_general_p, p.fft_p),
        *(p.reduce_sum_p, p.reduce_window_sum_p, monoids.SUM),
    }
)
"""Primitives whose results hold no element of their operands."""

JUMPS = frozenset(
    {
        *(p.eq_p, p.ne_p, p.ge_p, p.gt_p, p.le_p, p.lt_p),
        *(p.acos_p, p.acosh_p, p.and_p, p.asin_p, p.atan2_p, p.atanh_p, p.ceil_p),
        *(p.digamma_p, p.div_p, p.erf_inv_p, p.floor_p, p.igamma_p, p.igammac_p),
        *(p.lgamma_p, p.log1p_p, p.log_p, p.polygamma_p, p.pow_p, p.rem_p, p.round_p),
        *(p.regularized_incomplete_beta_p, p.rsqrt_p, p.shift_right_arithmetic_p),
        *(p.shift_right_logical_p, p.sign_p, p.sqrt_p, p.zeta_p),
    }
)
"""Comparisons, and functions that last bits may take over an edge."""


def must_store(analysis: Analysis) -> dict[Value, None]:
    """The values that a stage decides on with what an earlier one made of them."""
    kept = analysis.kept
    # Shards compute pieces again of what they take whole.
    whole = {e.node for e in analysis.ended}
    values: list[Value] = []
    # Sets of values, as the bits of integers: what an operand's stage computes again
    # for it, element by element; all it is made of; what of it is of earlier stages.
    again: dict[Operand, int] = {}
    sources: dict[Operand, int] = {}
    earlier: dict[Operand, int] = {}
    stored: dict[Value, None] = {}
    for node in analysis.graph.nodes:
        ins = () if node.primitive in SUMS else node.ins
        before = _union(earlier, ins)
        both = before & _union(again, ins[node.primitive is p.div_p :])
        while both and _jumps(node):
            last = values[both.bit_length() - 1]
            stored[last] = None
            both &= ~again[last]
        is_elementwise = node.primitive in pointwise.RULES or node.primitive in MOVES
        for out in node.outs:
            bit = 0
            if node.primitive not in EXACT and is_inexact(out.aval):
                bit = 1 << len(values)
                values.append(out)
            here = bit | (_union(again, ins) if is_elementwise else 0)
            again[out] = 0 if out in kept else here
            made_of = _union(sources, ins)
            sources[out] = bit | made_of
            is_earlier = out in kept or node in whole
            # What a kept value itself is, no stage computes again.
            earlier[out] = made_of if is_earlier else before
    return stored


def _union(sets: Mapping[Operand, int], operands: Iterable[Operand]) -> int:
    union = 0
    for operand in operands:
        union |= sets.get(operand, 0)
    return union


def _jumps(node: Node) -> bool:
    """Whether last bits of its operands may change all of its results."""
    if node.primitive is p.convert_element_type_p:
        return is_inexact(node.ins[0].aval) and not is_inexact(node.outs[0].aval)
    if node.primitive is p.integer_pow_p:
        return bool(node.params["y"] < 0)
    return node.primitive in JUMPS or any(
        equation.primitive in JUMPS
        for jaxpr in jaxprs_in(node.params)
        for equation in equations(jaxpr)
    )
