"""Sums over a leading axis as running ones, over blocks of rows.

For CPU, the compiler of JAX before 0.12 is slow at ``(u * u).sum(0)`` where rows are
long: for each element of the result it walks through memory in steps of a row. Adding
whole rows is 30 to 60 times as fast. What the summed values are made of by cheap steps,
row by row, is computed inside the loop, so that they are never there as a whole. Blocks
of rows are halved, and their sums added up by halves of halves: the result is as
accurate as the compiler's.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardmap._jax.stages import SLOW_LEADING_SUMS
from shardmap.arrays.combining import COMBINE
from shardmap.plan.engine.factors import Factors
from shardmap.plan.engine.nodes import Node, Scalar
from shardmap.plan.engine.recipe import StaticRecipe, Step, take
from shardmap.plan.engine.rules import Factor, Rule, Windowed

LONG_ROW = 2**15
"""From how many elements on a row is long: below, the compiler is not slow."""

BLOCK = 8
"""How many rows are added at once."""


def pays() -> bool:
    """Whether the compiler is slow at sums over leading axes."""
    return SLOW_LEADING_SUMS and jax.default_backend() == "cpu"


class Run(NamedTuple):
    """A reduction over rows.

    Attributes:
      reduction: the number of its step.
      inside: the numbers of the steps that are computed row by row with it.
      rules: by node number.
    """

    reduction: int
    inside: tuple[int, ...]
    rules: Mapping[int, Factors]


def runs_of(
    static: StaticRecipe, nodes: Mapping[int, Node], rules: Mapping[int, Rule]
) -> dict[int, Run]:
    """The reductions of a recipe that run over rows, by the number of their step."""
    # Only rules that are data say which axes are rows.
    data = {k: rule for k, rule in rules.items() if isinstance(rule, Factors)}
    found: dict[int, Run] = {}
    users = _users(static)
    for number, step in enumerate(static.steps):
        rule = data.get(step.node)
        if rule is not None and _is_reduction(nodes[step.node], rule, step):
            found[number] = Run(number, _inside(static, data, users, number), data)
    return found


def _users(static: StaticRecipe) -> dict[int, list[tuple[int, int]]]:
    """Slot -> the steps and operands that take it; step -1 for a result."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, step in enumerate(static.steps):
        for k, ref in enumerate(step.ins):
            if ref is not None:
                found.setdefault(ref.slot, []).append((number, k))
    for k, ref in enumerate(static.outs):
        if ref is not None:
            found.setdefault(ref.slot, []).append((-1, k))
    return found


def _is_reduction(node: Node, rule: Factors, step: Step) -> bool:
    """Whether a step sums up, or the like, long rows of one operand."""
    # With an emitter it may be something else than the primitive does.
    if len(rule.ins) != 1 or rule.emitter:
        return False
    [axes], [ref] = list(map(list, rule.ins)), step.ins
    leading = len(rule.contracted)
    if ref is None or ref.slot < 0 or not axes or not leading:
        return False
    if list(rule.contracted) != axes[:leading]:
        return False
    dtype = node.outs[0].aval.dtype
    return (
        rule.contracted[axes[0]] in ("add", "max", "min")
        and list(rule.outs[0]) == axes[leading:]
        and step.static.crops == (None,)
        and ref.shape[0] > 1
        and math.prod(ref.shape[leading:]) >= LONG_ROW
        and dtype == node.ins[0].aval.dtype
        # Short floats would be rounded after each sum; the compiler adds wider ones up.
        and (jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize >= 4)
    )


def _rows(rule: Factors, step: Step) -> Factor | None:
    """The factor of the leading axis of a step that can be computed row by row."""
    if not rule.cheap or len(rule.outs) != 1:
        return None
    if not rule.outs[0] or step.static.crops != (None,):
        return None
    factor = rule.outs[0][0]
    if factor is None or factor in rule.wholes or factor in list(rule.outs[0])[1:]:
        return None
    for axes in rule.ins:
        for place, axis in enumerate(axes):
            if isinstance(axis, Windowed) and axis.factor == factor:
                return None
            if place and axis == factor:
                return None
    return factor


def _inside(
    static: StaticRecipe,
    rules: Mapping[int, Factors],
    users: Mapping[int, list[tuple[int, int]]],
    reduction: int,
) -> tuple[int, ...]:
    """The steps that only serve a reduction, and can be computed row by row."""
    found: dict[int, Factor] = {}

    def is_by_rows(number: int, k: int) -> bool:
        """Whether this operand of a step is taken row by row, as it is."""
        if number != reduction and number not in found:
            return False
        step = static.steps[number]
        ref = step.ins[k]
        if ref is None or ref.starts is not None:
            return False
        axes = list(rules[step.node].ins[k])
        return number == reduction or axes[:1] == [found[number]]

    # Backwards: whoever takes a step's result is known to be inside, or not, before it.
    for number in range(reduction - 1, -1, -1):
        step = static.steps[number]
        taken = users.get(step.first, [])
        if not taken or not all(is_by_rows(*user) for user in taken):
            continue
        rule = rules.get(step.node)
        if rule is not None and (factor := _rows(rule, step)) is not None:
            found[number] = factor
    return tuple(sorted(found))


def emit_run(
    run: Run,
    static: StaticRecipe,
    nodes: Mapping[int, Node],
    slots: Mapping[int, Any],
    starts: Mapping[int, Sequence[Any]],
) -> Any:
    """The result of a reduction over rows.

    Args:
      run: the reduction.
      static: the recipe.
      nodes: by number.
      slots: what the steps before gave.
      starts: the positions that each step gets.
    """
    own = {static.steps[number].first for number in run.inside}
    numbers = (*run.inside, run.reduction)
    rules = {number: run.rules[static.steps[number].node] for number in numbers}
    given: dict[tuple[int, int], Any] = {}
    for number in numbers:
        step = static.steps[number]
        operands = nodes[step.node].ins
        for k, (operand, ref) in enumerate(zip(operands, step.ins, strict=True)):
            if isinstance(operand, Scalar):
                given[number, k] = operand.value
            elif ref is not None and ref.slot not in own:
                given[number, k] = take(slots, ref, operand.aval.dtype)

    def block(start: Any, length: int) -> Any:
        """The rows of what is reduced, from ``start`` on."""
        made: dict[int, Any] = {}

        def operand(number: int, k: int, factor: Factor) -> Any:
            ref = static.steps[number].ins[k]
            if ref is not None and ref.slot in own:
                return made[ref.slot]
            value = given.get((number, k))
            if factor not in list(rules[number].ins[k]):
                return value
            assert value is not None
            return lax.dynamic_slice_in_dim(value, start, length, 0)

        for number in run.inside:
            step, rule = static.steps[number], rules[number]
            factor = rule.outs[0][0]
            sizes = dict(zip(rule.sizes, step.static.sizes, strict=True))
            sizes[factor] = length
            local = step.static._replace(sizes=tuple(sizes.values()))
            positions = [
                _moved(position, start) if name == factor else position
                for position, name in zip(starts[number], rule.starts, strict=True)
            ]
            values = [operand(number, k, factor) for k in range(len(step.ins))]
            [made[step.first]] = rule.emit(values, local, positions)
        return operand(run.reduction, 0, summed)

    summed, *others = contracted = rules[run.reduction].contracted
    combine = COMBINE[contracted[summed]]
    [ref] = static.steps[run.reduction].ins
    assert ref is not None
    found = total(block, combine, 0, ref.shape[0])
    for _ in others:
        rows = functools.partial(lax.dynamic_slice_in_dim, found)
        found = total(rows, combine, 0, found.shape[0])
    return found


def _moved(position: Any, start: Any) -> Any:
    # One is as wide as the shard's positions are, the other as the loop's counter is.
    if isinstance(start, jax.Array) and isinstance(position, jax.Array):
        start = start.astype(position.dtype)
    return position + start


def total(
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
        return combine(found, total(block, combine, start + k * step, step))

    found = lax.fori_loop(1, length // step, more, total(block, combine, start, step))
    if rest := length % step:
        last = total(block, combine, start + length - rest, rest)
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
