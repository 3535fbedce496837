"""Sums over leading axes as loops over blocks of rows.

For CPU, the compiler of JAX before 0.12 is slow at ``(u * u).sum(0)`` where rows are
long: for each element of the result it walks through memory in steps of a row. Adding
whole rows is 30 to 60 times as fast. What is summed is computed inside the loop, a
block of rows at a time. Blocks are halved, and their sums added up by halves of halves:
the result is as accurate as the compiler's.
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

LONG_ROW = 2**15
"""The least elements of a long row: the compiler is fast at shorter ones."""

BLOCK = 8
"""How many rows are added at once."""

COMBINE: Mapping[Any, Callable[[Any, Any], Any]] = {
    p.reduce_sum_p: lax.add,
    p.reduce_max_p: lax.max,
    p.reduce_min_p: lax.min,
}


def by_rows(
    function: Callable[..., Any], primitives: Collection[Any]
) -> Callable[..., Any]:
    """A function of arrays, with its sums over long rows as loops over rows.

    Args:
      function: the function.
      primitives: those of the nodes that it was made from.
    """
    if not SLOW_LEADING_SUMS or jax.default_backend() != "cpu":
        return function
    if not any(q in COMBINE or isinstance(q, PlanPrimitive) for q in primitives):
        return function

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _evaluate(jaxpr: Jaxpr, values: Sequence[Any]) -> list[Any]:
    """As `jax.core.eval_jaxpr`, with sums over long rows as loops over rows."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
    inside = _inside(jaxpr)
    deferred = {number for numbers in inside.values() for number in numbers}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else known[atom]

    def rows(equations: Sequence[Equation], start: Any, length: int) -> Any:
        """Some rows of the operand of the last of these equations."""
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
                return operands[0]
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
                combine = COMBINE[equation.primitive]
                blocks = functools.partial(rows, equations)
                length = aval_of(equation.invars[0]).shape[0]
                for _ in equation.params["axes"]:
                    outs = [_total(blocks, combine, 0, length)]
                    blocks = functools.partial(lax.dynamic_slice_in_dim, outs[0])
                    length = outs[0].shape[0]
            else:
                outs = bind(equation, list(map(read, equation.invars)), equation.params)
        known.update(zip(equation.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _inside(jaxpr: Jaxpr) -> dict[int, list[int]]:
    """The sums over long rows -> the equations that run in their loops, by number."""
    users: dict[Any, list[tuple[int, int]]] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for k, atom in enumerate(equation.invars):
            if not isinstance(atom, jex_core.Literal):
                users.setdefault(atom, []).append((number, k))
    results = {v for v in jaxpr.outvars if not isinstance(v, jex_core.Literal)}
    found = {}
    for reduction, equation in enumerate(jaxpr.eqns):
        if _is_over_rows(equation):
            inside = {reduction}
            # Backwards: what takes a result is known to be inside, or not, before it.
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
            found[reduction] = sorted(inside - {reduction})
    return found


def _is_over_rows(equation: Equation) -> bool:
    """Whether an equation is a sum, or an extremum, of long rows."""
    if equation.primitive not in COMBINE:
        return False
    operand, axes = aval_of(equation.invars[0]), equation.params["axes"]
    dtype = operand.dtype
    return (
        len(axes) > 0
        and tuple(axes) == tuple(range(len(axes)))
        and operand.shape[0] > 1
        and math.prod(operand.shape[len(axes) :]) >= LONG_ROW
        # Short floats would be rounded after each sum; the compiler adds wider ones up.
        and (jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize >= 4)
    )


def _is_by_rows(equation: Equation, k: int) -> bool:
    """Whether the rows of an operand become those of the result, or are summed."""
    if equation.primitive in COMBINE:
        return True
    dims = equation.params.get("broadcast_dimensions", (0,))
    rows = aval_of(equation.outvars[0]).shape[0]
    return dims[:1] == (0,) and aval_of(equation.invars[k]).shape[:1] == (rows,)


def _of_rows(equation: Equation, length: int) -> Params | None:
    """The parameters for some rows; None if rows of the result are no others' rows."""
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


def _total(
    block: Callable[[Any, int], Any],
    combine: Callable[[Any, Any], Any],
    start: Any,
    length: int,
) -> Any:
    """What rows come to: blocks of blocks, so that few numbers are added in a row."""
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
    """Rows combined by halves; the odd one comes last."""
    while (count := rows.shape[0]) > 1:
        half = count // 2
        odd = rows[2 * half :]
        rows = combine(rows[:half], rows[half : 2 * half])
        if count % 2:
            rows = lax.concatenate([rows, odd], 0)
    return rows[0]
