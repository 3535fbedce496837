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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

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
from shardmap.plan.lax.indexed.known import constant, scalar_of
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

FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    p.abs_p: np.abs,
    p.add_p: np.add,
    p.asinh_p: np.arcsinh,
    p.atan_p: np.arctan,
    p.cbrt_p: np.cbrt,
    p.cos_p: np.cos,
    p.cosh_p: np.cosh,
    p.div_p: np.divide,
    p.erf_p: math.erf,
    p.exp2_p: np.exp2,
    p.exp_p: np.exp,
    p.expm1_p: np.expm1,
    p.integer_pow_p: np.float_power,
    p.log1p_p: np.log1p,
    p.log_p: np.log,
    p.mul_p: np.multiply,
    p.neg_p: np.negative,
    p.pow_p: np.power,
    p.sin_p: np.sin,
    p.sinh_p: np.sinh,
    p.sqrt_p: np.sqrt,
    p.square_p: np.square,
    p.sub_p: np.subtract,
    p.tan_p: np.tan,
    p.tanh_p: np.tanh,
}
"""The functions that numbers of selected elements are followed through."""

EDGES: Mapping[Any, tuple[float, ...]] = {
    **dict.fromkeys((p.log_p, p.pow_p, p.rsqrt_p, p.sign_p, p.sqrt_p), (0,)),
    **dict.fromkeys((p.acos_p, p.acosh_p, p.asin_p, p.atanh_p), (-1, 1)),
    **dict.fromkeys((p.erf_inv_p, p.log1p_p), (-1, 1)),
}
"""Where functions are not continuous, or not defined on one side."""

JUMPS = frozenset(
    {
        *(p.and_p, p.atan2_p, p.ceil_p, p.digamma_p, p.floor_p, p.igamma_p),
        *(p.igammac_p, p.lgamma_p, p.polygamma_p, p.regularized_incomplete_beta_p),
        *(p.rem_p, p.round_p, p.shift_right_arithmetic_p, p.shift_right_logical_p),
        p.zeta_p,
    }
)
"""Functions for which any number is taken for an edge."""

MARGIN = 0.01
"""A number that is nearer to an edge may be rounded to its other side."""

MOST_COMBINATIONS = 8
"""The most combinations of terms, or of numbers, of a function's operands that are
followed."""

Term: TypeAlias = int
"""The number of an expression. Whatever selects elements is left out of expressions: a
value and its maximum have one term, and so have their squares."""

Apart: TypeAlias = frozenset[tuple[Term, int, bool]]
"""Where else a term comes from: the terms of which elements were selected, by which
stages, and whether these took them whole, as shards then compute pieces again."""

HERE: Apart = frozenset()

Values: TypeAlias = frozenset[Value]

Numbers: TypeAlias = Mapping[float, Values]
"""The numbers that an operand is where elements were selected, and of which values.
``y - y.max()`` is 0 where ``y`` is largest. A constant has its own number."""

NOWHERE: Values = frozenset()

K = TypeVar("K")
V = TypeVar("V")


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
        if _selects(node):
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
            if math.prod(map(len, every)) <= MOST_COMBINATIONS:
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
        """The values that operands are made of, computed in different places."""
        every: dict[Term, list[Apart]] = {}
        for operand in node.ins:
            for term, apart in self.of(operand).items():
                every.setdefault(term, []).append(apart)
        for aparts in every.values():
            for selected, *_ in HERE.union(*aparts) - aparts[0].intersection(*aparts):
                if selected in self.made:
                    yield self.made[selected]


def _selects(node: Node) -> bool:
    return node.primitive in SELECTIONS or bool(node.params.get("selects"))


def _is_selected(term: Term, apart: Apart) -> bool:
    """Whether elements of the term itself were selected elsewhere."""
    return any(selected == term for selected, *_ in apart)


def _union(found: Iterable[tuple[K, frozenset[V]]]) -> dict[K, frozenset[V]]:
    merged: dict[K, frozenset[V]] = {}
    for key, more in found:
        merged[key] = merged.get(key, frozenset()) | more
    return merged


def must_store(analysis: Analysis) -> dict[Value, None]:
    """The values that a stage compares with what an earlier one selected of them."""
    found: dict[Value, None] = {}
    terms = _Terms(analysis)
    numbers: dict[Operand, Numbers] = {}
    for node in analysis.graph.nodes:
        met = frozenset(terms.met(node))
        ins = [numbers.get(operand) or _number_of(operand) for operand in node.ins]
        for value in _compared(node, ins, met):
            if value not in analysis.kept and is_rounded(analysis, value):
                found[value] = None
        numbers.update(dict.fromkeys(node.outs, _result(node, ins, met)))
        terms.visit(node)
    if not found:
        return found
    smallest = analysis.smallest()
    stored = [_selected_of(v, smallest[v]) for v in found]
    return {value: None for value in stored if value not in analysis.kept}


def _selected_of(value: Value, smallest: Sequence[Value]) -> Value:
    """The smallest value that all uses of a value take, if it is selected of it."""
    [made, *others] = smallest
    source: Operand = made
    while source is not value:
        node = source.producer
        if node is None or not _selects(node):
            return value
        source = node.ins[0]
    return value if others else made


def _number_of(operand: Operand) -> Numbers:
    """The number of a constant."""
    scalar = scalar_of(operand)
    if not isinstance(scalar, Scalar) or constant(scalar) is None:
        return {}
    is_real = dtypes.issubdtype(scalar.aval.dtype, np.floating)
    return {float(scalar.value): NOWHERE} if is_real else {}


def _result(node: Node, ins: Sequence[Numbers], met: Values) -> Numbers:
    """The numbers of a node's results, of operands that are made of ``met``."""
    if met and node.primitive in (p.add_p, p.div_p, p.sub_p):
        # One is the negative of the other if they are added.
        return {1.0 if node.primitive is p.div_p else 0.0: met}
    function = FUNCTIONS.get(node.primitive)
    if function is None:
        return _union(e for each in ins for e in each.items()) if _selects(node) else {}
    if node.primitive is p.integer_pow_p:
        ins = [*ins, {node.params["y"]: NOWHERE}]
    elif not all(ins) and node.primitive in (p.div_p, p.mul_p):
        zeros = [each[0.0] for each in ins if 0 in each]
        return {0.0: NOWHERE.union(*zeros)} if zeros else {}
    if math.prod(map(len, ins)) > MOST_COMBINATIONS:
        return {}
    made = []
    for each in itertools.product(*(numbers.items() for numbers in ins)):
        with np.errstate(all="ignore"):
            number = float(function(*(number for number, _ in each)))
        if math.isfinite(number):
            made.append((number, NOWHERE.union(*(values for _, values in each))))
    return _union(made)


def _compared(node: Node, ins: Sequence[Numbers], met: Values) -> Values:
    """The values of which last bits decide what a node makes of selected elements."""
    if node.primitive in COMPARISONS:
        pairs = itertools.product(*(numbers.items() for numbers in ins))
        return met.union(*(v | w for (m, v), (n, w) in pairs if abs(m - n) < MARGIN))
    jumps = node.primitive in JUMPS or _compares_inside(node)
    edges = EDGES.get(node.primitive, ())
    if node.primitive is p.div_p:
        edges, ins = (0,), ins[1:]
    elif node.primitive is p.integer_pow_p and node.params["y"] < 0:
        edges = (0,)
    elif node.primitive is p.convert_element_type_p:
        jumps = not _is_inexact(node.outs[0].aval)
    return (met if jumps else NOWHERE).union(
        *(
            values
            for numbers in ins
            for number, values in numbers.items()
            if jumps or any(abs(number - edge) < MARGIN for edge in edges)
        )
    )


def _compares_inside(node: Node) -> bool:
    """Whether a loop or a branch compares floats, or has a function with an edge."""
    return any(
        equation.primitive in COMPARISONS | EDGES.keys() | JUMPS
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
