"""Values that must not be computed twice, since what is selected of them is compared.

``y >= top_k(y)[-1]`` selects an element of ``y`` in one stage and looks for it in the
next. If that computes ``y`` again, its last bits may differ, and the element is not
found. So a stage of its own computes ``y``, unless it is as exact as the arguments.

So it does if equal functions of both are compared, as in ``2 * y >= 2 * y.max()``, or
if ``y.max() - y`` is computed, which is 0 for one element, and then a function that is
not continuous there or not defined below, such as a square root.

The planner marks its own nodes that select elements by a parameter, ``selects``.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

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
from shardmap.plan.engine.jaxpr_key import key_of
from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.lax import pointwise
from shardmap.plan.lax.indexed.known import scalar_of
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
        *(BARRIER, OPTIMIZATION_BARRIER, SPLIT, STACK, TILE, UNSTACK),
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

ZERO_AT_ZERO = frozenset(
    {
        *(p.asinh_p, p.atan_p, p.cbrt_p, p.erf_p, p.expm1_p, p.sin_p, p.sinh_p),
        *(p.tan_p, p.tanh_p),
    }
)
"""Functions that pass 0 on."""

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


Term: TypeAlias = int
"""The number of an expression. Whatever selects elements is left out of expressions: a
value and its maximum have one term, and so have their squares."""

Apart: TypeAlias = frozenset[tuple[Term, int, bool]]
"""Where else a term comes from: the terms of which elements were selected, by which
stages, and whether these took them whole, as shards then compute pieces again."""

HERE: Apart = frozenset()

MOST_TERMS = 8
"""A function of operands with more combinations of terms has a term of its own."""


class _Terms:
    """The terms of the operands of a graph, of nodes from first to last.

    Attributes:
      made: term -> the value that has it, where elements are not selected yet.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._level, self._kept = analysis.level, analysis.kept
        self._ended = {each.node for each in analysis.ended}
        self._numbers: dict[Hashable, Term] = {}
        self._terms: dict[Operand, dict[Term, Apart]] = {}
        self.made: dict[Term, Value] = {}

    def of(self, operand: Operand) -> Mapping[Term, Apart]:
        """The terms of an operand, and what of them is computed elsewhere."""
        if isinstance(operand, Scalar):
            return {self._number((key_of(operand.value), operand.aval)): HERE}
        if operand not in self._terms:
            self._set(operand, {self._number(operand): HERE})
        return self._terms[operand]

    def visit(self, node: Node) -> None:
        """Finds the terms of a node's results."""
        if node.primitive in SELECTIONS or node.params.get("selects"):
            operands = [x for x in node.ins if isinstance(x, Value)] or node.ins
            merged = _union(e for x in operands for e in self.of(x).items())
            is_whole = node in self._ended
            for out in node.outs:
                is_apart = is_whole or out in self._kept
                made = dict(merged)
                for term, apart in merged.items():
                    if is_apart and not _is_selected(term, apart):
                        made[term] = apart | {(term, self._level[out], is_whole)}
                self._set(out, made)
        elif node.primitive in pointwise.RULES and len(node.outs) == 1:
            every = [self.of(operand).items() for operand in node.ins]
            if math.prod(map(len, every)) <= MOST_TERMS:
                function = node.primitive, key_of(node.params), node.outs[0].aval.dtype
                found = []
                for each in itertools.product(*every):
                    term = self._number((function, *(term for term, _ in each)))
                    found.append((term, HERE.union(*(apart for _, apart in each))))
                self._set(node.outs[0], _union(found))

    def _number(self, key: Hashable) -> Term:
        return self._numbers.setdefault(key, len(self._numbers))

    def _set(self, value: Value, terms: dict[Term, Apart]) -> None:
        self._terms[value] = terms
        for term, apart in terms.items():
            if not _is_selected(term, apart):
                self.made.setdefault(term, value)

    def met(self, node: Node) -> Iterator[Value]:
        """The values that two operands are made of, computed in different places."""
        for left, right in itertools.combinations(map(self.of, node.ins), 2):
            for term in left.keys() & right.keys():
                for selected, *_ in left[term] ^ right[term]:
                    if selected in self.made:
                        yield self.made[selected]


def _is_selected(term: Term, apart: Apart) -> bool:
    """Whether elements of the term itself were selected elsewhere."""
    return any(selected == term for selected, *_ in apart)


def _union(found: Iterable[tuple[Term, Apart]]) -> dict[Term, Apart]:
    merged: dict[Term, Apart] = {}
    for term, apart in found:
        merged[term] = merged.get(term, HERE) | apart
    return merged


def must_store(analysis: Analysis) -> dict[Value, None]:
    """The values that a stage compares with what an earlier one selected of them."""
    found: dict[Value, None] = {}
    terms = _Terms(analysis)
    # Value -> the values that what is selected of them was subtracted from, or divides.
    differences: dict[Operand, frozenset[Value]] = {}
    for node in analysis.graph.nodes:
        passed = frozenset().union(*(differences.get(x, ()) for x in node.ins))
        compared = {*passed} if _has_edge(node) else set()
        if node.primitive in COMPARISONS:
            compared.update(terms.met(node))
        elif node.primitive in SELECTIONS or node.params.get("selects"):
            differences.update(dict.fromkeys(node.outs, passed))
        elif node.primitive in ARITHMETIC | ZERO_AT_ZERO:
            differences[node.outs[0]] = passed.union(terms.met(node))
            if node.primitive is p.div_p:
                compared.update(differences.get(node.ins[1], ()))
        elif jaxprs_in(node.params) and _has_edge_inside(node):
            compared |= passed.union(terms.met(node))
        for value in compared:
            if value not in analysis.kept and is_rounded(analysis, value):
                found[value] = None
        terms.visit(node)
    return found


def _has_edge(node: Node) -> bool:
    """Whether a result changes much if an operand is a little less than 0 or 1."""
    if node.primitive in COMPARISONS:
        known = map(scalar_of, node.ins)
        return any(isinstance(x, Scalar) and x.value in (-1, 0, 1) for x in known)
    if node.primitive is p.convert_element_type_p:
        return not _is_inexact(node.outs[0].aval)
    is_inverse = node.primitive is p.integer_pow_p and node.params["y"] < 0
    return is_inverse or node.primitive in EDGES


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
