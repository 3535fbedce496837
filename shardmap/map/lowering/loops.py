"""Blocks of elements in a loop of vectorised parts: ``batch_size``.

The function of one element is cut at its final reductions over the axis. What comes
before them runs in a `jax.lax.scan`, some elements at a time, and the reductions
accumulate. What follows them is the same for all elements, and runs once at the end.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, NoReturn

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import axis_index_p

from shardmap._jax.primitives import axis_names
from shardmap._jax.types import Equation, Jaxpr, Value
from shardmap._jax.walk import inline_calls
from shardmap.map.collectives.rewrites import without_sums_of_shared
from shardmap.map.collectives.split import collectives_of, combines_all, is_collective
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.differing import differing, is_in
from shardmap.map.lowering.effects import has_effect, if_present
from shardmap.map.primitives.axis import AxisLayout


class _Stages(NamedTuple):
    """The function of one element, cut at its final reductions.

    Attributes:
      element: of each element. Takes its index ``indices`` times, then the operands;
        gives what is reduced, then the results that need no reduction.
      indices: how often the function asks for the element's index.
      reductions: the equations that reduce.
      epilogue: once. Takes the reduced values, then the operands that are not mapped;
        gives the other results.
      in_epilogue: which results those are.
    """

    element: Any
    indices: int
    reductions: list[Any]
    epilogue: Any
    in_epilogue: list[bool]


def _cut(jaxpr: Jaxpr, axis: AxisLayout, in_axes: Sequence[int | None]) -> _Stages:
    """Cuts the function of one element at its final reductions over the axis.

    Refused: elements that need the result of a collective, or call the host with it, as
    all of them would have to be there at once.
    """

    def refuse(problem: str) -> NoReturn:
        raise ValueError(
            f"batch_size={axis.batch_size} is less than the {axis.block} elements of "
            f"axis {axis.name!r} on each device, {problem}"
        )

    def refuse_collective(collective: Equation, where: str) -> NoReturn:
        refuse(
            f"but {collective.primitive} over that axis stands {where} the function: "
            "what follows needs the values of all elements at once. Leave batch_size "
            f"out, give at least {axis.block}, or make the collective the last step."
        )

    # What a function calls may end with a reduction.
    jaxpr = inline_calls(jaxpr, lambda e: bool(collectives_of(e, axis.name)))
    differs = tuple(in_axis is not None for in_axis in in_axes)
    differ = differing(jaxpr, axis.name, differs)
    jaxpr = without_sums_of_shared(jaxpr, axis.name, axis.size, differ)
    unmapped = [v for v, a in zip(jaxpr.invars, in_axes, strict=True) if a is None]
    element: list[Any] = []
    indices: list[Any] = []
    reductions: list[Any] = []
    epilogue: list[Any] = []
    # What the epilogue may take, and what follows from reductions.
    known, reduced = {*unmapped}, set[Any]()
    for equation in jaxpr.eqns:
        held = collectives_of(equation, axis.name)
        is_direct = is_collective(equation, axis.name)
        is_alike = not (
            held
            or has_effect(equation)
            or any(is_in(atom, differ) for atom in equation.outvars)
            or any(
                isinstance(atom, jex_core.Var) and atom not in known
                for atom in equation.invars
            )
        )
        if is_alike:
            epilogue.append(equation)
            known.update(equation.outvars)
        if any(is_in(atom, reduced) for atom in equation.invars):
            if not is_alike:
                refuse_collective(reductions[-1], "in the middle of")
            reduced.update(equation.outvars)
        elif not held:
            # Also what all elements compute alike, and XLA drops where nobody asks.
            element.append(equation)
        elif is_direct and equation.primitive is axis_index_p:
            indices += equation.outvars
        elif combines_all(equation, axis.name):
            reductions.append(equation)
            reduced.update(equation.outvars)
            known.update(equation.outvars)
        elif is_direct:
            refuse_collective(equation, "in the middle of")
        elif all(e.primitive is axis_index_p for e in held):
            refuse(
                f"and a {equation.primitive} in the function asks for axis_index over "
                "that axis. Call jax.lax.axis_index before it, and use its result "
                "inside."
            )
        else:
            refuse_collective(held[0], f"in a {equation.primitive} in")

    in_epilogue = [is_in(atom, reduced) for atom in jaxpr.outvars]
    of_all = list(compress(jaxpr.outvars, in_epilogue))
    of_each = [v for v in jaxpr.outvars if not is_in(v, reduced)]
    return _Stages(
        _some_equations(
            jaxpr,
            [*indices, *jaxpr.invars],
            [*(equation.invars[0] for equation in reductions), *of_each],
            element,
        ),
        len(indices),
        reductions,
        _some_equations(
            jaxpr,
            [*(equation.outvars[0] for equation in reductions), *unmapped],
            of_all,
            epilogue,
        ),
        in_epilogue,
    )


def _some_equations(
    jaxpr: Jaxpr, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]
) -> Any:
    """Some equations of ``jaxpr``, as a jaxpr."""
    effects = {effect for equation in eqns for effect in equation.effects}
    return jaxpr.replace(
        invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects
    )


def loop(
    jaxpr: Jaxpr,
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., list[Any]]:
    """A function of a device's blocks that runs some of their elements at a time."""
    stages = _cut(jaxpr, axis, in_axes)
    rules: list[Any] = [COLLECTIVES[e.primitive].rule for e in stages.reductions]
    calls_host = any(map(has_effect, stages.element.eqns))
    is_vectorised = axis.vectorised > 1 and not calls_host

    def run(*blocks: Value) -> list[Any]:
        mapped = [
            jnp.moveaxis(block, in_axis, 0)
            for block, in_axis in zip(blocks, in_axes, strict=True)
            if in_axis is not None
        ]
        unmapped = [b for b, a in zip(blocks, in_axes, strict=True) if a is None]

        def element(index: Value, *mapped: Value) -> list[Any]:
            each_block, same = iter(mapped), iter(unmapped)
            args = [
                next(same if in_axis is None else each_block) for in_axis in in_axes
            ]
            indices = [index] * stages.indices
            return jax.core.eval_jaxpr(stages.element, (), *indices, *args)

        def step(
            accumulated: Sequence[Value], given: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            """Some elements' results, and what is reduced with them."""
            if calls_host:
                results = lax.map(
                    lambda args: if_present(args[0], axis.size, element, *args), given
                )
            elif is_vectorised:
                results = jax.vmap(element)(*given)
            else:
                result_of_one = element(*(array[0] for array in given))
                results = [jnp.expand_dims(result, 0) for result in result_of_one]
            present = given[0] < axis.size
            combined = [
                rule.accumulate(before, value, present)
                for rule, before, value in zip(
                    rules, accumulated, results[: len(rules)], strict=True
                )
            ]
            return combined, results[len(rules) :]

        start = [
            rule.start(equation.invars[0].aval)
            for rule, equation in zip(rules, stages.reductions, strict=True)
        ]
        accumulated, per_element = _scan(
            step, start, [axis.indices(), *mapped], axis.vectorised
        )
        reduced = [
            rule.finish(axis, value, axis_names(equation.params)).astype(
                equation.outvars[0].aval.dtype
            )
            for rule, equation, value in zip(
                rules, stages.reductions, accumulated, strict=True
            )
        ]
        epilogue = jax.core.eval_jaxpr(stages.epilogue, (), *reduced, *unmapped)

        of_each, of_all = iter(per_element), iter(epilogue)
        results = []
        for out_axis, in_epilogue in zip(out_axes, stages.in_epilogue, strict=True):
            if in_epilogue and out_axis is not None:
                value = jnp.expand_dims(next(of_all), out_axis)
                results.append(jnp.repeat(value, axis.block, out_axis))
            elif in_epilogue:
                results.append(next(of_all))
            elif out_axis is None:
                results.append(next(of_each)[0])
            else:
                results.append(jnp.moveaxis(next(of_each), 0, out_axis))
        return results

    return run


def _scan(
    step: Callable[..., Any], start: Any, arrays: Sequence[Value], size: int
) -> tuple[Any, list[Any]]:
    """`jax.lax.scan` over ``size`` entries at a time; what is left is a last step."""
    steps = len(arrays[0]) // size
    looped = steps * size
    carry, stacked = lax.scan(
        step,
        start,
        [a[:looped].reshape(steps, size, *a.shape[1:]) for a in arrays],
    )
    results = [a.reshape(looped, *a.shape[2:]) for a in stacked]
    if looped < len(arrays[0]):
        carry, more = step(carry, [a[looped:] for a in arrays])
        results = list(map(jnp.concatenate, zip(results, more, strict=True)))
    return carry, results
