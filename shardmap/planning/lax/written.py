"""Rules written as text, such as ``i k, k j -> i j; k add``."""

import itertools
from collections.abc import Sequence
from typing import Any

from shardmap.arrays.combining import COMBINE
from shardmap.planning.engine.factors import Factors, Local, bind
from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.rules import MANY, Axis, Factor, Reason

WHOLE = Reason("its rule says that this axis is needed whole")


def parsed(text: str) -> tuple[list[list[str]], list[list[str]], dict[Factor, str]]:
    body, *combined = text.split(";")
    left, arrow, right = body.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"a rule has the form 'i j -> i; j add', got {text!r}")
    contracted: dict[Factor, str] = {}
    for item in combined:
        words = item.split()
        if len(words) != 2 or words[1] not in COMBINE:
            raise ValueError(
                f"{item.strip()!r} in the rule {text!r} must be an axis and one of "
                f"{', '.join(COMBINE)}"
            )
        if contracted.setdefault(words[0], words[1]) != words[1]:
            raise ValueError(
                f"the rule {text!r} combines {words[0]!r} both by "
                f"{contracted[words[0]]} and by {words[1]}: give one of them"
            )
    ins = [part.split() for part in left.split(",")] if left.strip() else []
    outs = [part.split() for part in right.split(",")]
    named = {name for part in ins for name in part}
    for axis in itertools.chain(*ins, *outs):
        if not (axis in ("*", "...") or axis.isidentifier()):
            raise ValueError(
                f"{axis!r} in the rule {text!r} is no axis: give a name, * or ..."
            )
    for axis in itertools.chain(*outs):
        if axis not in named and axis != "*":
            raise ValueError(
                f"the results have the axis {axis!r} in the rule {text!r}, but no "
                "operand has: write * for an axis that is always whole"
            )
    for name in contracted:
        if name not in named or any(name in part for part in outs):
            raise ValueError(f"{name!r} is not summed over in the rule {text!r}")
    return ins, outs, contracted


def factors(node: Node, text: str) -> Factors:
    """Makes the rule of an equation from its text."""
    ins, outs, contracted = parsed(text)
    wholes: dict[Factor, Reason] = {}
    sizes: dict[Factor, int] = {}

    def spread(
        side: str, rows: Sequence[Sequence[str]], shapes: Sequence[tuple[int, ...]]
    ) -> list[list[Axis]]:
        if len(rows) != len(shapes):
            raise ValueError(
                f"the rule {text!r} of {node.name} has {len(rows)} {side}, the "
                f"equation {len(shapes)}"
            )
        wide_axes = []
        for k, (names, shape) in enumerate(zip(rows, shapes, strict=True)):
            rest = len(shape) - (len(names) - names.count("..."))
            wide: list[Any] = []
            for name in names:
                wide += [("...", n) for n in range(rest)] if name == "..." else [name]
            if len(wide) != len(shape):
                raise ValueError(
                    f"the rule {text!r} of {node.name} does not fit the shape {shape}"
                )
            for axis, name in enumerate(wide):
                if name == "*":
                    wide[axis] = (side, k, axis)
                    wholes[wide[axis]] = WHOLE
                elif shape[axis] == 1 and sizes.get(name, 1) != 1:
                    wide[axis] = None
                elif sizes.setdefault(name, shape[axis]) != shape[axis]:
                    raise ValueError(
                        f"the rule {text!r} of {node.name} does not fit: axis "
                        f"{name!r} has the sizes {sizes[name]} and {shape[axis]}"
                    )
            wide_axes.append(wide)
        return wide_axes

    results = spread("results", outs, node.out_shapes)
    operands = spread("operands", ins, node.in_shapes)

    def emit(local: Local) -> Sequence[Any]:
        results_of_node = bind(node, local.values, node.params)
        for axes, result in zip(results, results_of_node, strict=True):
            said = tuple(1 if axis is None else local.sizes[axis] for axis in axes)
            if result.shape != said:
                raise ValueError(
                    f"the rule {text!r} of {node.name} says that a piece of its result "
                    f"has the shape {said}, but the primitive gives {result.shape}: "
                    "correct the rule"
                )
        return results_of_node

    return Factors(
        node,
        operands,
        results,
        contracted=contracted,
        wholes=wholes,
        emitter=emit,
        cheap=False,
        each=MANY,
    )
