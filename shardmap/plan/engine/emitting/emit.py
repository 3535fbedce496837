"""The function of a recipe: its steps one after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.source_info_util import user_context

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
) -> Callable[[Sequence[Any], Starts], list[Any]]:
    """The function that runs a recipe: ``(boxes that were read, starts) -> results``.

    Args:
      static: the recipe.
      nodes: by number.
      rules: by node number.
      demanded: the values whose boxes were asked for.
    """

    def function(reads: Sequence[Any], starts: Starts) -> list[Any]:
        slots: dict[int, Any] = dict(enumerate(reads))

        def read(value: Operand | None, ref: Ref | None) -> Any:
            if isinstance(value, Scalar):
                return value.value
            if ref is None or value is None:
                return None
            return take(slots, ref, value.aval.dtype)

        position = 0
        for step in static.steps:
            node = nodes[step.node]
            own = [starts[position + k] for k in range(step.start_count)]
            position += step.start_count
            info = node.source_info
            with user_context(info and info.traceback):
                ins = [read(v, ref) for v, ref in zip(node.ins, step.ins, strict=True)]
                outs = rules[step.node].emit(ins, step.static, own)
            slots.update(enumerate(outs, step.first))
        return [read(v, ref) for v, ref in zip(demanded, static.outs, strict=True)]

    return function
