"""Blocks of elements in a loop of vectorised parts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.collectives import AXIS_INDEX
from shardmap._jax.types import Atom, Equation, Jaxpr, Value
from shardmap.map.collectives.reductions import REDUCTIONS
from shardmap.map.collectives.split import is_collective, uses_axis
from shardmap.map.collectives.split_axis import SplitAxis
from shardmap.map.lowering.effects import if_present
from shardmap.map.lowering.host_calls import has_effect


class _LoopParts(NamedTuple):
    """A function of one element, cut where its final reductions over the axis are.

    Attributes:
      before: per element; gives what is to be reduced, then the results that need no
        reduction. Takes the element's index, then the operands.
      reductions: the equations that reduce.
      after: once; takes the reduced values, then the operands that are not mapped, and
        gives the results that need them.
      is_after: which results ``after`` gives.
    """

    before: Any
    reductions: list[Any]
    after: Any
    is_after: list[bool]


def _reads_index(before: Jaxpr) -> bool:
    """Whether an element asks for its index, its first operand."""
    index = before.invars[0]
    return any(
        atom is index
        for atoms in (before.outvars, *(equation.invars for equation in before.eqns))
        for atom in atoms
    )


def loop(
    jaxpr: Jaxpr,
    axis: SplitAxis,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    batch_size: int,
) -> Callable[..., list[Any]]:
    parts = _cut(jaxpr, axis, in_axes, batch_size)
    reduced = len(parts.reductions)
    has_effects = any(map(has_effect, parts.before.eqns))
    asks = bool(reduced or has_effects or _reads_index(parts.before))
    mapped_in = [in_axis is not None for in_axis in in_axes]
    steps = axis.block // batch_size

    def run(*blocks: Value) -> list[Any]:
        whole = [b for b, mapped in zip(blocks, mapped_in, strict=True) if not mapped]
        # XLA without Shardy cannot compile a device's number that nothing asks for.
        indices = axis.indices() if asks else np.arange(axis.block, dtype=np.int32)
        elements = [jnp.asarray(indices)] + [
            jnp.moveaxis(block, in_axis, 0)
            for block, in_axis in zip(blocks, in_axes, strict=True)
            if in_axis is not None
        ]

        def element(index: Value, *mapped: Value) -> list[Any]:
            rest, unmapped = iter(mapped), iter(whole)
            args = [next(rest) if m else next(unmapped) for m in mapped_in]
            return jax.core.eval_jaxpr(parts.before, (), index, *args)

        def batch(
            accumulated: Sequence[Value], given: Sequence[Any]
        ) -> tuple[Any, Any]:
            if has_effects:
                results = lax.map(
                    lambda args: if_present(args[0], axis.size, element, *args), given
                )
            elif batch_size == 1:
                alone = element(*(array[0] for array in given))
                results = [jnp.expand_dims(result, 0) for result in alone]
            else:
                results = jax.vmap(element)(*given)
            present = given[0] < axis.size
            combined = [
                REDUCTIONS[equation.primitive].accumulate(before, value, present)
                for equation, before, value in zip(
                    parts.reductions, accumulated, results[:reduced], strict=True
                )
            ]
            return combined, results[reduced:]

        looped = [
            array[: steps * batch_size].reshape(steps, batch_size, *array.shape[1:])
            for array in elements
        ]
        start = [
            REDUCTIONS[equation.primitive].start(equation.invars[0].aval)
            for equation in parts.reductions
        ]
        accumulated, stacked = lax.scan(batch, start, looped)
        results = [
            array.reshape(steps * batch_size, *array.shape[2:]) for array in stacked
        ]
        if axis.block % batch_size:
            rest = [array[steps * batch_size :] for array in elements]
            accumulated, last = batch(accumulated, rest)
            results = [
                jnp.concatenate(pair) for pair in zip(results, last, strict=True)
            ]
        accumulated = [
            REDUCTIONS[equation.primitive].finish(axis, value, equation.params["axes"])
            for equation, value in zip(parts.reductions, accumulated, strict=True)
        ]
        once = iter(jax.core.eval_jaxpr(parts.after, (), *accumulated, *whole))
        each = iter(results)
        placed = []
        for out_axis, is_after in zip(out_axes, parts.is_after, strict=True):
            if not is_after:
                value = next(each)
                value = (
                    value[0] if out_axis is None else jnp.moveaxis(value, 0, out_axis)
                )
            else:
                value = next(once)
                if out_axis is not None:
                    value = jnp.expand_dims(value, out_axis)
                    value = jnp.repeat(value, axis.block, out_axis)
            placed.append(value)
        return placed

    return run


def _cut(
    jaxpr: Jaxpr, axis: SplitAxis, in_axes: Sequence[int | None], batch_size: int
) -> _LoopParts:
    """Cuts the function at its final reductions over the axis.

    Raises:
      ValueError: a collective whose result elements still need: all would have to be
        there at once.
    """
    index = jex_core.Var(jax.core.ShapedArray((), np.dtype(np.int32)))
    whole = [
        var
        for var, in_axis in zip(jaxpr.invars, in_axes, strict=True)
        if in_axis is None
    ]
    before: list[Any] = []
    reductions: list[Any] = []
    after: list[Any] = []
    is_late: set[Any] = set()  # The variables that need a reduced value.
    indices: set[Any] = set()

    def refuse(collective: Equation) -> None:
        raise ValueError(
            f"batch_size={batch_size} is less than the {axis.block} elements of axis "
            f"{axis.name!r} on each device, but {collective.primitive} over that axis "
            "stands in the middle of the function: what follows needs the values of "
            "all elements at once. Leave batch_size out, give at least "
            f"{axis.block}, or make the collective the last step."
        )

    for equation in jaxpr.eqns:
        collectives = uses_axis(jaxpr.replace(eqns=[equation]), axis.name)
        direct = is_collective(equation, axis.name)
        variables = [v for v in equation.invars if not isinstance(v, jex_core.Literal)]
        if any(v in is_late for v in variables):
            if collectives or not all(v in is_late or v in whole for v in variables):
                refuse(reductions[-1])
            after.append(equation)
            is_late.update(equation.outvars)
        elif direct and equation.primitive is AXIS_INDEX.primitive:
            indices.update(equation.outvars)
        elif direct and _is_plain_reduction(equation):
            reductions.append(equation)
            is_late.update(equation.outvars)
        elif collectives:
            refuse(collectives[0])
        else:
            before.append(equation)

    def renamed(atom: Atom) -> Any:
        is_index = not isinstance(atom, jex_core.Literal) and atom in indices
        return index if is_index else atom

    is_after = [
        not isinstance(v, jex_core.Literal) and v in is_late for v in jaxpr.outvars
    ]
    early, late = (
        [v for v, after in zip(jaxpr.outvars, is_after, strict=True) if after is wanted]
        for wanted in (False, True)
    )
    return _LoopParts(
        before=jaxpr.replace(
            invars=[index, *jaxpr.invars],
            outvars=[renamed(v) for v in [e.invars[0] for e in reductions] + early],
            eqns=[e.replace(invars=list(map(renamed, e.invars))) for e in before],
            effects=_effects(before),
        ),
        reductions=reductions,
        after=jaxpr.replace(
            invars=[*(e.outvars[0] for e in reductions), *whole],
            outvars=late,
            eqns=after,
            effects=_effects(after),
        ),
        is_after=is_after,
    )


def _effects(equations: Sequence[Any]) -> set[Any]:
    return {effect for equation in equations for effect in equation.effects}


def _is_plain_reduction(equation: Equation) -> bool:
    return (
        equation.primitive in REDUCTIONS
        and equation.params["axis_index_groups"] is None
        and not any(isinstance(axis, int) for axis in equation.params["axes"])
    )
