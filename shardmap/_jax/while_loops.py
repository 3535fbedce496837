"""How JAX vectorises while loops whose conditions have effects of ours.

JAX lowers a loop in another way if its condition has ordered effects, and then forgets
to keep what elements had that have ended: `jax.vmap` of such a loop gives wrong numbers
without a word. A primitive in the condition is not asked. So this is the one rule of
JAX's own that is replaced, for loops that have such an effect; all others go to JAX's
own rule, unchanged.
"""

from collections.abc import Callable
from typing import Any

from jax.extend.core.primitives import while_p
from jax.interpreters import batching

if while_p not in batching.fancy_primitive_batchers:
    raise ImportError(
        "shardmap vectorises while loops that are tapped in their condition, but JAX "
        "has no rule for them where it was. It works with JAX 0.10.2 to 0.12: install "
        "one of these, or a newer shardmap."
    )

_rule_of_jax = batching.fancy_primitive_batchers[while_p]


def vectorize_loops(applies: Callable[[Any], bool], rule: Callable[..., Any]) -> None:
    """Has JAX vectorise some while loops by ``rule``.

    Args:
      applies: tells from the closed jaxpr of a loop's condition.
      rule: takes what JAX's own rule takes, and gives the same.
    """

    def chosen(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
        one = rule if applies(params["cond_jaxpr"]) else _rule_of_jax
        return one(axis_data, args, dims, **params)

    batching.fancy_primitive_batchers[while_p] = chosen
