"""The temporary memory of operations, by the kernels of XLA for CPU.

Measured with programs of one operation each. Where the compiler's own count leaves
something out, as it does for what a kernel takes while it runs, it is the growth of the
process.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import primitives as p

from shardmap._jax.types import Equation, aval_of
from shardmap.plan.engine.keys import itemsize, nbytes


def scratch(equation: Equation) -> int:
    """The bytes that an operation takes besides its operands and results."""
    rule = RULES.get(equation.primitive)
    return 0 if rule is None else math.ceil(rule(equation))


def _operands(times: float) -> Callable[[Equation], float]:
    return lambda equation: times * sum(map(nbytes, equation.invars))


def _results(times: float) -> Callable[[Equation], float]:
    return lambda equation: times * sum(map(nbytes, equation.outvars))


def _sort(equation: Equation) -> float:
    """Rows are sorted one after the other, a few at once."""
    shape = aval_of(equation.invars[0]).shape
    rows = math.prod(shape) // max(shape[equation.params["dimension"]], 1)
    return 3 * _operands(1)(equation) * min(16 / max(rows, 1), 1)


def _convolution(equation: Equation) -> float:
    """Operands and results are laid out anew."""
    return _operands(1)(equation) + _results(1)(equation)


LINES, SUMMED = 4096, 1024
"""How many rows, or columns, and how much of what is summed, is in one block."""


def _product(equation: Equation) -> float:
    """Blocks of the operands are laid out anew.

    With a vector it is a reduction, whose result is laid out anew.
    """
    left, right = (aval_of(v) for v in equation.invars)
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    summed = math.prod(left.shape[axis] for axis in contracted)
    many = math.prod(left.shape[axis] for axis in batch)
    rows, columns = (
        math.prod(aval.shape) // max(summed * many, 1) for aval in (left, right)
    )
    if min(rows, columns) == 1:
        return _results(1)(equation)
    lines = min(rows, LINES) + min(columns, LINES)
    return 0.6 * lines * min(summed, SUMMED) * itemsize(left)


_RUNNING = (p.cumsum_p, p.cumprod_p, p.cummax_p, p.cummin_p, p.cumlogsumexp_p)
REDUCTIONS = (
    *(p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_prod_p),
    *(p.reduce_and_p, p.reduce_or_p, p.reduce_xor_p, p.reduce_p),
)

RULES: Mapping[Any, Callable[[Equation], float]] = {
    # By windows of 16, and those by windows of 16.
    **dict.fromkeys(_RUNNING, _operands(9 / 8)),
    # By windows of 32.
    **dict.fromkeys(REDUCTIONS, _operands(1 / 16)),
    **dict.fromkeys((p.igamma_p, p.igammac_p, p.igamma_grad_a_p), _results(36)),
    p.regularized_incomplete_beta_p: _results(10),
    p.conv_general_dilated_p: _convolution,
    p.dot_general_p: _product,
    p.fft_p: _results(1 / 16),
    p.random_bits_p: _results(2.1),
    p.random_gamma_p: _results(32),
    p.select_and_gather_add_p: _operands(3),
    p.select_and_scatter_add_p: _operands(3),
    p.sort_p: _sort,
    # The words of the key, for each number.
    p.threefry2x32_p: _results(4),
    p.top_k_p: _operands(1 / 32),
    p.triangular_solve_p: _operands(1),
}
"""For each primitive that takes more: how much."""
