"""Effects of a function in pieces: each happens once per piece of its operands.

A callback without results, such as `jax.debug.print`, is called with each piece of its
operands. Whatever else has an effect, a callback that returns something or a loop that
holds one, is taken whole, and happens once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import jax

from shardmap._jax.effects import has_external_effect
from shardmap._jax.types import ClosedJaxpr, Equation
from shardmap._jax.walk import jaxprs_in, rewrite_jaxpr
from shardmap.map.primitives.tap import is_no_tap, tap_p
from shardmap.plan.engine.factors import Factors, Local, bind, taken_whole
from shardmap.plan.engine.nodes import Graph, Node, Operand
from shardmap.plan.engine.rules import Reason
from shardmap.plan.lax.table import TABLE

ONCE = Reason(
    "what has an effect and gives results happens once, for the whole of it",
    "an effect outside of it, without results, happens piece by piece",
)


def silent(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr without the callbacks that give no results."""

    def change(equation: Equation) -> Any:
        shown = equation.effects and all(map(has_external_effect, equation.effects))
        return [] if shown and _by_pieces(equation) else equation

    if not any(map(has_external_effect, jaxpr.effects)):
        return jaxpr
    return cast(ClosedJaxpr, rewrite_jaxpr(jaxpr, change, is_no_tap))


@dataclass(frozen=True)
class EffectPrimitive:
    """The primitive of nodes with an effect. All are equal: they have one rule."""

    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name


def add_effect(
    graph: Graph, node: Node, equation: Equation
) -> Sequence[Operand] | None:
    """Adds an equation with an effect; None: the effect is not one of the host."""
    if not all(map(has_external_effect, equation.effects)):
        return None
    shape = [size for operand in node.ins for size in operand.shape]
    effect: Any = jax.core.ShapedArray(
        tuple(shape) if _by_pieces(equation) else (), "bool"
    )
    *outs, value = graph.add(
        EffectPrimitive(str(equation.primitive)),
        {"equation": equation},
        node.ins,
        [*(out.aval for out in node.outs), effect],
    )
    graph.effects.append(value)
    return outs


def _by_pieces(equation: Equation) -> bool:
    """Whether it is a callback without results; a tap's jaxpr is not run."""
    is_callback = equation.primitive is tap_p or not jaxprs_in(equation.params)
    return is_callback and not equation.outvars


def _rule(node: Node) -> Factors:
    equation: Any = node.params["equation"]
    if _by_pieces(equation):
        ends = accumulate(map(len, node.in_shapes))
        ins = [
            list(range(end - len(shape), end))
            for end, shape in zip(ends, node.in_shapes, strict=True)
        ]
        made = Factors(node, ins, [[axis for axes in ins for axis in axes]])
    else:
        made = taken_whole(node, ONCE)
        made.complete = frozenset(range(len(node.ins)))
        made.runs_once = True

    def emit(local: Local) -> list[Any]:
        return [*bind(equation, local.values, equation.params), None]

    made.emitter, made.cheap = emit, False
    return made


EFFECT: Any = EffectPrimitive("")
TABLE.makers[EFFECT] = _rule
