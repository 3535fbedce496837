"""Rules of elementwise primitives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from shardmap._jax.types import is_inexact
from shardmap.planning.engine.factors import Factors, Local
from shardmap.planning.engine.nodes import Node, Scalar
from shardmap.planning.engine.rules import RuleMaker, nothing_passes
from shardmap.planning.lax.indexed.known import constant
from shardmap.planning.lax.primitives import MULHI, NEWER, OPTIMIZATION_BARRIER

NodePasses: TypeAlias = Callable[[Node, str, frozenset[int]], str | None]
"""The form of `Rule.passes`, with the node."""


def pointwise(
    passes: NodePasses | None = None,
    emitter: Callable[[Local], Sequence[Any]] | None = None,
) -> RuleMaker:
    """``i j, i j -> i j``: operands of rank 0 and axes of size 1 are broadcast."""

    def rule(node: Node) -> Factors:
        shape = node.out_shapes[0]
        ins = [
            [axis if n == shape[axis] else None for axis, n in enumerate(operand)]
            for operand in node.in_shapes
        ]
        outs = [list(range(len(out))) for out in node.out_shapes]
        node_passes = functools.partial(passes, node) if passes else nothing_passes
        return Factors(node, ins, outs, emitter=emitter, passes=node_passes)

    return rule


def product(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    """Linear in each operand if the other one is complete and finite.

    A contraction passes partial sums only if its result is no larger than they are:
    every shard computes it.
    """
    if combiner != "add" or len(pending) != 1:
        return None
    [number] = pending
    partial, other, [out] = node.ins[number].aval, node.ins[1 - number], node.outs
    if node.primitive is not p.mul_p and (
        out.size > partial.size or out.aval.dtype != partial.dtype
    ):
        return None
    # ``1 * inf + -2 * inf`` is NaN.
    known = constant(other) if is_inexact(node.outs[0].aval) else 1
    is_finite = known is not None and np.isfinite(known).all()
    return combiner if is_finite else None


def _quotient(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    below = node.ins[1]
    if pending != {0} or not isinstance(below, Scalar) or not bool(below.value != 0):
        return None
    return product(node, combiner, pending) if is_inexact(node.outs[0].aval) else None


def _sum(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    """What is linear in all operands together."""
    is_all = len(pending) == len(node.ins)
    return combiner if combiner == "add" and is_all else None


def _extremum(extremum: str) -> NodePasses:
    return lambda node, combiner, pending: combiner if combiner == extremum else None


def _negated(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    swapped = {"min": "max", "max": "min"} if is_inexact(node.outs[0].aval) else {}
    return {"add": "add", **swapped}.get(combiner)


def _unchanged(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    return combiner


def _chosen(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    """``select_n``: partial results pass if all cases are partial."""
    return combiner if pending == frozenset(range(1, len(node.ins))) else None


def _converted(node: Node, combiner: str, pending: frozenset[int]) -> str | None:
    before, after = node.ins[0].aval.dtype, node.outs[0].aval.dtype
    kinds = jnp.inexact if combiner == "add" else jnp.number
    try:
        is_wider = jnp.promote_types(before, after) == after
    except jax.dtypes.TypePromotionError:  # Small floats and integers have none.
        return None
    is_linear = combiner in ("add", "min", "max") and is_wider
    numbers = jnp.issubdtype(before, kinds) and jnp.issubdtype(after, kinds)
    return combiner if is_linear and numbers else None


ONE_BY_ONE = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz conj cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log
    log1p logistic lt lt_to ne nextafter not or polygamma population_count pow
    reduce_precision regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh
    threefry2x32 xor zeta
""".split()
"""The elementwise primitives that need complete operands."""

RULES: dict[Any, RuleMaker] = {
    **{getattr(p, f"{name}_p"): pointwise() for name in ONE_BY_ONE},
    **{q: pointwise() for q in (*NEWER, MULHI)},
    **{q: pointwise(_sum) for q in (p.add_p, p.add_jaxvals_p, p.sub_p)},
    **{q: pointwise(_sum) for q in (p.real_p, p.imag_p, p.complex_p)},
    OPTIMIZATION_BARRIER: pointwise(_unchanged),
    p.copy_p: pointwise(_unchanged, emitter=lambda local: local.values),
    p.convert_element_type_p: pointwise(_converted),
    p.div_p: pointwise(_quotient),
    p.max_p: pointwise(_extremum("max")),
    p.min_p: pointwise(_extremum("min")),
    p.mul_p: pointwise(product),
    p.neg_p: pointwise(_negated),
    p.select_n_p: pointwise(_chosen),
}
