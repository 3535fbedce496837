"""Computes reductions in other ways than XLA where XLA for CPU is slow at them.

Before JAX 0.12 it is slow at ``(u * u).sum(0)`` if rows are long: it reads memory in
steps of a row. Adding whole rows is 30 to 60 times as fast. The loop computes the
operand of the sum too, a block of rows at a time. Sums are pairwise, which is as
accurate as XLA's order. In XLA a scatter of rows, as of the months of a series, is such
a loop already, but its updates are computed before it and take memory.

Of ``((x[1:] - x[:-1]) ** 2).sum()`` XLA stores both slices, as it fuses the difference
with the sum. Not fused, it takes a half to a ninth of the time, and one array.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p
from jax.extend.source_info_util import user_context

from shardmap._jax.stages import SLOW_LEADING_SUMS
from shardmap._jax.types import Equation, Jaxpr, Params, aval_of
from shardmap.plan.engine.factors import bind
from shardmap.plan.engine.nodes import PlanPrimitive
from shardmap.plan.lax import pointwise
from shardmap.plan.lax.reduce import COMBINERS

LONG_ROW = 2**15
"""The fewest elements of a long row. XLA is fast at shorter ones."""

BLOCK = 8
"""The number of rows of a block."""

SLICES = frozenset({p.dynamic_slice_p, p.slice_p})
"""The primitives whose results XLA stores if it fuses their users with a reduction."""

MOVES = frozenset({p.broadcast_in_dim_p, p.reshape_p, p.squeeze_p, p.transpose_p})
"""The primitives that XLA fuses with a reduction as it does elementwise ones."""

SCATTERS = frozenset({p.scatter_add_p, p.scatter_max_p, p.scatter_min_p})

SCATTERED_ROW = 1024
"""The fewest elements of a row that is scattered by itself."""

COMBINE: Mapping[Any, Callable[[Any, Any], Any]] = {
    p.reduce_sum_p: lax.add,
    p.reduce_max_p: lax.max,
    p.reduce_min_p: lax.min,
}


def for_cpu(
    function: Callable[..., Any], primitives: Collection[Any]
) -> Callable[..., Any]:
    """Returns a function with the same results and, on CPU, with faster reductions.

    Args:
      function: the function.
      primitives: the primitives that it uses.
    """
    if jax.default_backend() != "cpu":
        return function
    reduces = any(q in COMBINERS or isinstance(q, PlanPrimitive) for q in primitives)
    is_slow = SLOW_LEADING_SUMS or not SLICES.isdisjoint(primitives)
    if SCATTERS.isdisjoint(primitives) and not (reduces and is_slow):
        return function

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _evaluate(jaxpr: Jaxpr, values: Sequence[Any]) -> list[Any]:
    """As `jax.core.eval_jaxpr`, with the reductions of the module."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    inside, of_slices = _inside(jaxpr), _of_slices(jaxpr)
    deferred = {number for numbers in inside.values() for number in numbers}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else known[atom]

    def rows(equations: Sequence[Equation], start: Any, length: int) -> Any:
        """Some rows of the last operand of the last equation."""
        made: dict[Any, Any] = {}
        for equation in equations:
            operands = [
                made[atom]
                if not isinstance(atom, jex_core.Literal) and atom in made
                else lax.dynamic_slice_in_dim(read(atom), start, length, 0)
                if _is_by_rows(equation, k)
                else read(atom)
                for k, atom in enumerate(equation.invars)
            ]
            if equation is equations[-1]:
                return operands[-1]
            params = _of_rows(equation, length)
            [made[equation.outvars[0]]] = bind(equation, operands, params or {})
        raise AssertionError

    for number, equation in enumerate(jaxpr.eqns):
        if number in deferred:
            continue
        outs: Sequence[Any]
        with user_context(equation.source_info.traceback):
            if number in inside:
                equations = [jaxpr.eqns[k] for k in (*inside[number], number)]
                blocks = functools.partial(rows, equations)
                length = aval_of(equation.invars[-1]).shape[0]
                if equation.primitive in SCATTERS:
                    start, indices, _ = equation.invars
                    outs = [_scattered(equation, blocks, read(start), read(indices))]
                for _ in equation.params.get("axes", ()):
                    combine = COMBINE[equation.primitive]
                    outs = [_total(blocks, combine, 0, length)]
                    blocks = functools.partial(lax.dynamic_slice_in_dim, outs[0])
                    length = outs[0].shape[0]
            else:
                operands = list(map(read, equation.invars))
                if number in of_slices:
                    operands = list(map(not_fused, operands))
                outs = bind(equation, operands, equation.params)
        known.update(zip(equation.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _inside(jaxpr: Jaxpr) -> dict[int, list[int]]:
    """The sums and scatters of rows -> the equations in their loops, by number."""
    users: dict[Any, list[tuple[int, int]]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for k, atom in enumerate(equation.invars):
            if not isinstance(atom, jex_core.Literal):
                users.setdefault(atom, []).append((number, k))
    results = {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    found = {}
    for reduction, equation in enumerate(jaxpr.eqns):
        if _is_over_rows(equation) or _scatters_rows(equation):
            inside = {reduction}
            # Backwards: the users of a result are decided before its own equation.
            for number in reversed(range(reduction)):
                outs = jaxpr.eqns[number].outvars
                taken = [user for out in outs for user in users.get(out, ())]
                if (
                    (len(outs) == 1 and taken and outs[0] not in results)
                    and all(
                        k in inside and _is_by_rows(jaxpr.eqns[k], operand)
                        for k, operand in taken
                    )
                    and _of_rows(jaxpr.eqns[number], 1) is not None
                ):
                    inside.add(number)
            if inside != {reduction} or equation.primitive in COMBINE:
                found[reduction] = sorted(inside - {reduction})
    return found


def _of_slices(jaxpr: Jaxpr) -> set[int]:
    """The numbers of reductions of elementwise functions of several slices."""
    found = set()
    slices: dict[Any, frozenset[int]] = {}  # At most two of each value.
    for number, equation in enumerate(jaxpr.eqns):
        atoms = [v for v in equation.invars if not isinstance(v, jex_core.Literal)]
        own = frozenset().union(*(slices.get(v, ()) for v in atoms))
        primitive = equation.primitive
        if primitive in COMBINERS and len(own) > 1:
            found.add(number)
        if primitive in SLICES:
            own = frozenset({number})
        if primitive in SLICES or primitive in MOVES or primitive in pointwise.RULES:
            slices |= dict.fromkeys(equation.outvars, frozenset(sorted(own)[:2]))
    return found


def not_fused(x: jax.Array) -> jax.Array:
    """The same numbers, which XLA does not compute in a kernel of what uses them."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


def _is_over_rows(equation: Equation) -> bool:
    """Whether an equation is a sum or an extremum over long rows."""
    if not SLOW_LEADING_SUMS or equation.primitive not in COMBINE:
        return False
    operand, axes = aval_of(equation.invars[0]), equation.params["axes"]
    dtype = operand.dtype
    return (
        0 < len(axes) < len(operand.shape)
        and tuple(axes) == tuple(range(len(axes)))
        and operand.shape[0] > 1
        and math.prod(operand.shape[len(axes) :]) >= LONG_ROW
        # Short floats would be rounded after each sum. XLA sums them in float32.
        and (jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize >= 4)
    )


def _scatters_rows(equation: Equation) -> bool:
    """Whether an equation is a scatter of long rows, each to a place of the operand."""
    if equation.primitive not in SCATTERS:
        return False
    numbers, updates = equation.params["dimension_numbers"], equation.invars[2]
    shape = aval_of(updates).shape
    return (
        len(shape) > 1
        and numbers.update_window_dims == tuple(range(1, len(shape)))
        and numbers.inserted_window_dims == (0,)
        and not numbers.operand_batching_dims
        and math.prod(shape[1:]) >= SCATTERED_ROW
    )


def _is_by_rows(equation: Equation, k: int) -> bool:
    """Whether rows of an operand become rows of the result, or are combined."""
    if equation.primitive in COMBINE:
        return True
    if equation.primitive in SCATTERS:
        return k == 2
    dims = equation.params.get("broadcast_dimensions", (0,))
    rows = aval_of(equation.outvars[0]).shape[0]
    return dims[:1] == (0,) and aval_of(equation.invars[k]).shape[:1] == (rows,)


def _of_rows(equation: Equation, length: int) -> Params | None:
    """The parameters for some rows; None if it does not work row by row."""
    primitive, params = equation.primitive, equation.params
    shape = aval_of(equation.outvars[0]).shape
    if len(shape) < 2:
        return None
    if primitive in pointwise.RULES:
        return params
    if primitive is p.broadcast_in_dim_p:
        return params | {"shape": (length, *shape[1:]), "sharding": None}
    if primitive is p.slice_p and _is_by_rows(equation, 0):
        return params | {"limit_indices": (length, *params["limit_indices"][1:])}
    if primitive is p.transpose_p and params["permutation"][0] == 0:
        return params
    return None


def _scattered(
    equation: Equation, block: Callable[[Any, int], Any], start: Any, indices: Any
) -> Any:
    """A scatter, one row after the other, in the order of XLA."""

    def more(k: Any, found: Any) -> Any:
        index = lax.dynamic_slice_in_dim(indices, k, 1, 0)
        [found] = bind(equation, [found, index, block(k, 1)], equation.params)
        return found

    return lax.fori_loop(0, indices.shape[0], more, start)


def _total(
    block: Callable[[Any, int], Any],
    combine: Callable[[Any, Any], Any],
    start: Any,
    length: int,
) -> Any:
    """Sums rows in blocks of blocks, so that few are added one after the other."""
    if length <= BLOCK:
        return _halved(block(start, length), combine)
    step = BLOCK
    while step * BLOCK < length:
        step *= BLOCK

    def more(k: Any, found: Any) -> Any:
        return combine(found, _total(block, combine, start + k * step, step))

    found = lax.fori_loop(1, length // step, more, _total(block, combine, start, step))
    if rest := length % step:
        last = _total(block, combine, start + length - rest, rest)
        found = combine(found, last)
    return found


def _halved(rows: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """The sum of rows by halves; an odd row comes last."""
    while (count := rows.shape[0]) > 1:
        half = count // 2
        odd = rows[2 * half :]
        rows = combine(rows[:half], rows[half : 2 * half])
        if count % 2:
            rows = lax.concatenate([rows, odd], 0)
    return rows[0]
