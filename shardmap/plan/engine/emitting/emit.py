"""The function of a recipe: its steps one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.source_info_util import user_context

from shardmap.plan.engine.emitting import running
from shardmap.plan.engine.nodes import Node, Operand, Scalar
from shardmap.plan.engine.recipe import Ref, StaticRecipe, take
from shardmap.plan.engine.rules import Rule

Starts: TypeAlias = Sequence[jax.Array] | jax.Array
"""Positions, traced."""


def emit(
    static: StaticRecipe,
    nodes: Mapping[int, Node],
    rules: Mapping[int, Rule],
    demanded: Sequence[Operand | None],
    by_rows: bool = False,
) -> Callable[[Sequence[Any], Starts], list[Any]]:
    """The function that runs a recipe: ``(boxes that were read, starts) -> results``.

    Args:
      static: the recipe.
      nodes: by number.
      rules: by node number.
      demanded: the values whose boxes were asked for.
      by_rows: whether sums over leading axes may run over blocks of rows, where the
        compiler is slow at them.
    """
    runs: Mapping[int, running.Run] = {}
    if by_rows and running.pays():
        runs = running.runs_of(static, nodes, rules)
    inside = {number for run in runs.values() for number in run.inside}

    def function(reads: Sequence[Any], starts: Starts) -> list[Any]:
        slots: dict[int, Any] = dict(enumerate(reads))

        def read(value: Operand | None, ref: Ref | None) -> Any:
            if isinstance(value, Scalar):
                return value.value
            if ref is None or value is None:
                return None
            return take(slots, ref, value.aval.dtype)

        position = 0
        begins: dict[int, list[Any]] = {}
        for number, step in enumerate(static.steps):
            node = nodes[step.node]
            own = [starts[position + k] for k in range(step.start_count)]
            position += step.start_count
            begins[number] = own
            if number in inside:
                continue
            info = node.source_info
            with user_context(info and info.traceback):
                if number in runs:
                    slots[step.first] = running.emit_run(
                        runs[number], static, nodes, slots, begins
                    )
                    continue
                ins = [read(v, ref) for v, ref in zip(node.ins, step.ins, strict=True)]
                outs = rules[step.node].emit(ins, step.static, own)
            slots.update(enumerate(outs, step.first))
        return [read(v, ref) for v, ref in zip(demanded, static.outs, strict=True)]

    return function
