"""`register_rule` and `rules_of`."""

from collections.abc import Callable

import jax

from shardmap._jax.types import Primitive, PyTree
from shardmap.planning.engine.nodes import Node, flatten
from shardmap.planning.engine.rules import Rule, RuleMaker
from shardmap.planning.lax.table import TABLE
from shardmap.planning.lax.written import factors, parsed
from shardmap.units import shown


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
      >>> shard_plan = plan(norm_p.bind, jnp.ones((4, 6)), in_slices=({0: 2, 1: 3},))
      >>> shard_plan.num_shards, shard_plan.shards[0].combiner
      (6, 'add')
    """
    if not isinstance(primitive, Primitive):
        raise TypeError(
            "a rule is for a jax.extend.core.Primitive, such as "
            f"jax.extend.core.primitives.add_p, got {shown(primitive)}"
        )
    if isinstance(rule, str):
        parsed(rule)
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
    graph = flatten(jax.make_jaxpr(fun)(*args), TABLE)
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
