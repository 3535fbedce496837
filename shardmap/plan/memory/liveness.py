"""The memory of a program, from its jaxpr.

Every intermediate value is held from the equation that makes it to the last one that
uses it. A result takes the place of an operand of its size that is not used any more.
Pointwise equations are fused: a value that only one of them uses is not held. XLA for
CPU runs equations breadth first, so that much can run at once: the peak in this order
counts too. The scratch memory of kernels was measured, with programs of one operation
each.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.extend import source_info_util
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import OPTIMIZATION_BARRIER
from shardmap._jax.primitives import scan_counts
from shardmap._jax.types import Atom, Equation, Jaxpr, Var, aval_of
from shardmap._jax.walk import jaxprs_in
from shardmap.plan.engine.keys import itemsize, nbytes
from shardmap.plan.lax import pointwise
from shardmap.plan.lax.on_cpu import SLICES

IN_PLACE = frozenset(
    {
        *(p.dynamic_update_slice_p, p.reshape_p, p.scan_p, p.while_p),
        *(p.scatter_p, p.scatter_add_p, p.scatter_max_p, p.scatter_min_p),
    }
)
"""Primitives, besides pointwise ones, whose results may overwrite operands."""

FUSED = frozenset({p.broadcast_in_dim_p, p.iota_p}) | SLICES
"""Primitives, besides pointwise ones, that are computed where they are used."""

BETWEEN = 32
"""The memory divided by this is added, for what kernels hand on to each other."""


class Peak(NamedTuple):
    """The most that a program holds at once.

    Attributes:
      bytes: the bytes, besides its arguments and results.
      largest: the bytes of the largest value that it holds then.
      shape: that value, as jaxprs print it.
      source: where it is made; empty if it is read.
      is_kept: whether it is kept for later stages.
    """

    bytes: int
    largest: int = 0
    shape: str = ""
    source: str = ""
    is_kept: bool = False

    def plus(self, nbytes: int) -> "Peak":
        """The peak with more bytes."""
        return self._replace(bytes=self.bytes + nbytes)


def peak(jaxpr: Jaxpr) -> Peak:
    """The temporary memory of a program."""
    found = _peak(jaxpr, _variables(jaxpr.outvars))
    return found.plus(found.bytes // BETWEEN)


def _variables(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


class _Kernel(NamedTuple):
    """Equations that XLA computes at once, without storing what they hand on.

    Attributes:
      equation: the last equation, which makes what is stored.
      ins: what they read.
      inner: what is held inside of them.
      is_in_place: whether results may overwrite operands.
    """

    equation: Equation
    ins: list[Var]
    inner: Peak
    is_in_place: bool


def _peak(jaxpr: Jaxpr, given: Collection[Var] = ()) -> Peak:
    """As `peak`, for a program with results ``given`` that have memory already."""
    users = _users(jaxpr)
    kernels = _kernels(jaxpr, users)
    free = {*_made_in(jaxpr, users, given), *_read_through(jaxpr, users)}
    found = [
        _peak_in(order, jaxpr.outvars, free)
        for order in (kernels, _breadth_first(kernels))
    ]
    return max(found, key=lambda each: each.bytes)


def _users(jaxpr: Jaxpr) -> dict[Var, list[int]]:
    """The numbers of the equations that use a value."""
    users: dict[Var, list[int]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for v in dict.fromkeys(_variables(equation.invars)):
            users.setdefault(v, []).append(number)
    return users


def _kernels(jaxpr: Jaxpr, users: Mapping[Var, Sequence[int]]) -> list[_Kernel]:
    """Fuses equations with the pointwise one that alone uses their result."""
    results, equations = set(_variables(jaxpr.outvars)), list(jaxpr.eqns)
    kernel_of: dict[int, int] = {}  # By the numbers of equations.
    members: dict[int, list[Equation]] = {}
    reduced: set[int] = set()
    for number in reversed(range(len(equations))):
        equation = equations[number]
        kernel_of[number] = number
        own = [k for v in equation.outvars for k in users.get(v, ())]
        is_reduced = any(equations[k].primitive in REDUCTIONS for k in own)
        if is_reduced and equation.primitive is not p.reduce_precision_p:
            reduced.add(number)
        if _is_fused(equation) and len(own) == 1 and equation.outvars[0] not in results:
            [user] = own
            kernel = kernel_of[user]
            is_pointwise = kernel != user or _is_pointwise(equations[user])
            # Of what is reduced, XLA stores the slices; see `on_cpu`.
            is_stored = equation.primitive in SLICES and kernel in reduced
            if is_pointwise and not is_stored:
                kernel_of[number] = kernel
        members.setdefault(kernel_of[number], []).append(equation)
    found = []
    for _, fused in sorted(members.items()):
        made = {v for equation in fused for v in equation.outvars}
        read = [v for equation in fused for v in _variables(equation.invars)]
        ins = [v for v in dict.fromkeys(read) if v not in made]
        shifts = any(equation.primitive in SLICES for equation in fused[1:])
        is_in_place = _is_in_place(fused[0]) and not shifts
        found.append(_Kernel(fused[0], ins, _inside(fused[0]), is_in_place))
    return found


def _breadth_first(kernels: Sequence[_Kernel]) -> list[_Kernel]:
    """The kernels, each after those that were ready before it."""
    made = {v for kernel in kernels for v in kernel.equation.outvars}
    users: dict[Var, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for v in kernel.ins:
            users.setdefault(v, []).append(number)
    missing = [len(made.intersection(kernel.ins)) for kernel in kernels]
    ready = deque(number for number, count in enumerate(missing) if not count)
    order = []
    while ready:
        order.append(kernels[ready.popleft()])
        outs = order[-1].equation.outvars
        for number in sorted(k for v in outs for k in users.get(v, ())):
            missing[number] -= 1
            if not missing[number]:
                ready.append(number)
    return order


def _made_in(
    jaxpr: Jaxpr, users: Mapping[Var, Sequence[int]], given: Collection[Var]
) -> set[Var]:
    """The values that are made in the memory of the given results."""
    found = set(given)
    made = {v for equation in jaxpr.eqns for v in equation.outvars}
    for equation in reversed(jaxpr.eqns):
        if not _is_in_place(equation):
            continue
        for result in [v for v in equation.outvars if v in found]:
            for v in _variables(equation.invars):
                is_free = v in made and v not in found and len(users[v]) == 1
                if is_free and nbytes(v) == nbytes(result):
                    found.add(v)
                    break
    return found


def _is_in_place(equation: Equation) -> bool:
    """Whether results may overwrite operands."""
    return equation.primitive in IN_PLACE or _is_pointwise(equation)


def _read_through(jaxpr: Jaxpr, users: Mapping[Var, Sequence[int]]) -> set[Var]:
    """The values that XLA never stores: kernels compute them from their operands."""
    results = set(_variables(jaxpr.outvars))
    found: set[Var] = set()
    for equation in jaxpr.eqns:
        if equation.primitive in (p.reshape_p, OPTIMIZATION_BARRIER):
            # An argument, perhaps in another shape.
            operands = {*_variables(equation.invars)}
            if operands <= {*jaxpr.invars, *jaxpr.constvars, *found}:
                found |= {*equation.outvars} - results
            continue
        if equation.primitive in (p.broadcast_in_dim_p, p.iota_p):
            takes = _is_pointwise
        elif equation.primitive is p.transpose_p:
            takes = _is_product
        else:
            continue
        (result,) = equation.outvars
        if result not in results and all(
            takes(jaxpr.eqns[k]) for k in users.get(result, ())
        ):
            found.add(result)
    return found


def _is_pointwise(equation: Equation) -> bool:
    return equation.primitive in pointwise.RULES and not scratch(equation)


def _is_fused(equation: Equation) -> bool:
    """Whether it may be computed where its result is used."""
    return equation.primitive in FUSED or _is_pointwise(equation)


def _is_product(equation: Equation) -> bool:
    """Whether it is a product of two matrices; kernels take these transposed too."""
    ranks = {len(aval_of(v).shape) for v in equation.invars}
    return equation.primitive is p.dot_general_p and ranks == {2}


def _peak_in(
    kernels: Sequence[_Kernel], results: Sequence[Atom], free: set[Var]
) -> Peak:
    """The peak of kernels that run in this order."""
    last: dict[Any, int] = {}
    for number, kernel in enumerate(kernels):
        last.update((v, number) for v in kernel.ins)
    last.update((v, len(kernels)) for v in _variables(results))
    live: dict[Var, int] = {}
    # The live values, the largest first, with others that are not live any more.
    largest: list[tuple[int, int, Var, Equation]] = []
    at_most: list[tuple[int, int, Var, Equation]] = []
    held, most, order = 0, Peak(0), itertools.count()
    for number, (equation, ins, inner, is_in_place) in enumerate(kernels):
        ending = [v for v in ins if v in live and last[v] == number]
        taken = [live[v] for v in ending] if is_in_place else []
        spared = 0
        for v in equation.outvars:
            if v not in last:
                continue
            size = 0 if v in free else nbytes(v)
            live[v] = size
            heapq.heappush(largest, (-size, next(order), v, equation))
            held += size
            if size in taken:
                taken.remove(size)
                spared += size
        size = held - spared + inner.bytes
        if size > most.bytes:
            while largest and largest[0][2] not in live:
                heapq.heappop(largest)
            most, at_most = inner._replace(bytes=size), largest[:1]
        for v in ending:
            held -= live.pop(v)
    for negative, _, v, equation in at_most:
        if -negative >= most.largest:
            source = source_info_util.summarize(equation.source_info)
            return Peak(most.bytes, -negative, v.aval.str_short(), source)
    return most


def _inside(equation: Equation) -> Peak:
    """What the jaxprs in an equation need, besides its operands and results."""
    found = Peak(scratch(equation))
    for jaxpr in jaxprs_in(equation.params):
        # The results of a loop's body are copied to what the loop carries.
        is_loop = equation.primitive in (p.scan_p, p.while_p)
        own = _peak(jaxpr, () if is_loop else _variables(jaxpr.outvars))
        if equation.primitive is p.scan_p:
            sliced = jaxpr.invars[sum(scan_counts(equation.params)) :]
            own = own.plus(sum(map(nbytes, sliced)))
        found = max(found, own, key=lambda each: each.bytes)
    return found


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
    """Operands and results are copied to other layouts."""
    return _operands(1)(equation) + _results(1)(equation)


LINES, SUMMED = 4096, 1024
"""The most rows, or columns, of a block, and its most elements of the summed axes."""


def _product(equation: Equation) -> float:
    """Blocks of the operands are copied, after whole operands that are transposed.

    A product with a vector is a reduction, and its result is copied.
    """
    left, right = (aval_of(v) for v in equation.invars)
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    summed = math.prod(left.shape[axis] for axis in contracted)
    many = math.prod(left.shape[axis] for axis in batch)
    rows, columns = (
        math.prod(aval.shape) // max(summed * many, 1) for aval in (left, right)
    )
    whole = sum(map(nbytes, _transposed(equation)))
    if min(rows, columns) == 1:
        return whole + _results(1)(equation)
    lines = min(rows, LINES) + min(columns, LINES)
    return whole + 0.6 * lines * min(summed, SUMMED) * itemsize(left)


def _transposed(equation: Equation) -> Iterator[Atom]:
    """The operands of a product that XLA transposes before it.

    XLA takes batches of matrices, also transposed ones. It transposes other operands to
    matrices: the summed axes come last on the left, and first on the right.
    """
    summed, batch = equation.params["dimension_numbers"]
    is_mixed = any(list(axes) != sorted(axes) for axes in batch)
    for side, operand in enumerate(equation.invars):
        inner, outer = list(summed[side]), list(batch[side])
        axes = range(len(aval_of(operand).shape))
        others = [axis for axis in axes if axis not in inner + outer]
        order = outer + (inner + others if side else others + inner)
        is_batch = sorted(outer) == list(axes[: len(outer)])
        is_matrix = is_batch and max(len(inner), len(others)) < 2
        if is_mixed or not (is_matrix or order == list(axes)):
            yield operand


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
"""Primitive -> the bytes that an equation takes besides operands and results."""
