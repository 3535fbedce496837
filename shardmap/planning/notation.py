"""Rules written as text, and `register_rule`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.types import Primitive, PyTree
from shardmap.arrays.combining import COMBINE
from shardmap.planning.engine.factors import Factors, Local, bind
from shardmap.planning.engine.nodes import Node, flatten
from shardmap.planning.engine.rules import MANY, Axis, Factor, Reason, Rule, RuleMaker
from shardmap.planning.lax.table import CALLS, TABLE
from shardmap.units import shown

WHOLE = Reason("its rule says that this axis is needed whole")


def register_rule(
    primitive: Primitive, rule: str | Callable[[Node], str | Rule]
) -> None:
    """Registers how a plan may cut equations of a primitive.

    Args:
      primitive: a `jax.extend.core.Primitive`.
      rule: names for the axes of operands and results, such as ``"i k, k j -> i j"``. A
        cut of a named axis of an operand cuts the axis of that name in the results.
        ``"...; k add"`` says that parts over ``k`` combine by "add", "max", "min",
        "mul", "and", "or" or "xor". ``*`` is an axis that is needed whole. ``...``
        stands for all leading axes, which are independent. The primitive is bound with
        the same parameters to the pieces. Instead of text, ``rule`` may be a function
        of the equation (``primitive``, ``params``, ``in_shapes``, ``out_shapes``) that
        returns it.

    Raises:
      TypeError: ``rule`` is neither text nor a function.
      ValueError: ``rule`` does not have this form. If it is a function that fails,
        `plan` raises this error with the name of the primitive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardmap import plan, register_rule
      >>> from jax.extend.core import Primitive
      >>> norm_p = Primitive("norm")
      >>> _ = norm_p.def_abstract_eval(
      ...     lambda x: jax.core.ShapedArray(x.shape[:-1], x.dtype))
      >>> register_rule(norm_p, "... k -> ...; k add")
      >>> made = plan(norm_p.bind, jnp.ones((4, 6)), in_slices=({0: 2, 1: 3},))
      >>> made.num_shards, made.shards[0].combiner
      (6, 'add')
    """
    if not isinstance(primitive, Primitive):
        raise TypeError(
            "a rule is for a jax.extend.core.Primitive, such as "
            f"jax.extend.core.primitives.add_p, got {shown(primitive)}"
        )
    if isinstance(rule, str):
        _parse(rule)
        TABLE.makers[primitive] = _maker(lambda node: rule)
    elif callable(rule):
        TABLE.makers[primitive] = _maker(rule)
    else:
        raise TypeError(
            f"a rule is text or a function of an equation, got {shown(rule)}"
        )


def rules_of(fun: Callable[..., PyTree], *args: PyTree) -> str:
    """Returns the rules by which a plan cuts the equations of a function, one per line.

    Args:
      fun: the function.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`.

    Example:
      >>> import jax.numpy as jnp, shardmap as sm
      >>> fun = lambda x: jnp.sort(x[1:] @ x.T, 0)
      >>> print(sm.extend.rules_of(fun, jnp.ones((4, 3))))
      slice: a~ b -> a b
      dot_general: a b, c b -> a c; b add
      sort: * a -> * a
    """
    graph = flatten(jax.make_jaxpr(fun)(*args), CALLS)
    return "\n".join(f"{node.name}: {TABLE.rule(node)}" for node in graph.nodes)


def _maker(rule: Callable[[Node], str | Rule]) -> RuleMaker:
    def make(node: Node) -> Rule:
        try:
            written = rule(node)
        except Exception as error:
            raise ValueError(
                f"the rule registered for {node.name} failed for operands of the "
                f"shapes {list(node.in_shapes)}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(written, Rule):
            return written
        if not isinstance(written, str):
            raise TypeError(
                f"the function that is the rule of {node.name} must return text such "
                f"as 'i j -> i; j add', got {shown(written)}"
            )
        return factors(node, written)

    return make


def _parse(text: str) -> tuple[list[list[str]], list[list[str]], dict[Factor, str]]:
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
    ins, outs, contracted = _parse(text)
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
