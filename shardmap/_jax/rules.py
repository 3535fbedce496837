"""JAX's tables of rules that want more than public JAX says.

Those of vmap, of dead code, and of `jax.checkpoint`.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from jax.extend.core.primitives import remat_p
from jax.interpreters import batching, partial_eval

from shardmap._jax.types import Equation, Jaxpr, Param, Primitive, Value, Var

# Vectorisation


class Vmap(NamedTuple):
    """What JAX tells a rule of the vmap around it.

    Attributes:
      name: of its axis; JAX's own object if it has none.
      size: the number of elements.
      spmd_name: the mesh axis, or axes, of ``spmd_axis_name``; None: none.
    """

    name: Hashable
    size: int
    spmd_name: Any


Dims = Sequence[int | None]
Batched = tuple[Any, Any]
"""What a rule gives: the results, and where each has the batch; None: nowhere."""


def def_batching(primitive: Primitive, rule: Callable[..., Batched]) -> None:
    """Has JAX vectorise ``primitive`` by ``rule``, where nothing is batched too.

    The other table of JAX's has rules that are not told of the vmap, and not asked
    where no operand is batched.

    Args:
      primitive: any primitive.
      rule: takes a `Vmap`, the operands, where each has the batch, and the parameters
        by name.
    """

    def told(axis_data: Any, args: Sequence[Value], dims: Dims, **params: Param) -> Any:
        vmap = Vmap(axis_data.name, axis_data.size, axis_data.spmd_name)
        return rule(vmap, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = told


# Dead code

DeadCodeRule = Callable[[Sequence[bool], Equation], tuple[list[bool], Equation | None]]
"""Takes which results are used, and the equation; gives which operands are, and the
equation that is left, if any."""


def def_dce(primitive: Primitive, rule: DeadCodeRule) -> None:
    """Has JAX remove dead code from equations of ``primitive`` by ``rule``."""

    def told(used_outputs: Sequence[bool], *rest: object) -> Any:
        equation: Any = rest[-1]  # From JAX 0.12 on, the live inputs come before it.
        return rule(used_outputs, equation)

    partial_eval.dce_rules[primitive] = told


def without_dead_code(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> Any:
    """The jaxpr with what the used outputs need, and which inputs that are."""
    pruned, used_inputs = partial_eval.dce_jaxpr(jaxpr, used_outputs)
    # A copy, as JAX may give back the jaxpr that it is kept for.
    return pruned.replace(), used_inputs


# Rematerialisation


class Split(NamedTuple):
    """An equation under `jax.checkpoint`, in what runs forward and what backward.

    Attributes:
      forward, backward: the equations; either may be None.
      unknown_out: which results are unknown forward.
      available_out: which are there backward.
      saved: the variables that are saved for it.
    """

    forward: Equation | None
    backward: Equation | None
    unknown_out: Sequence[bool]
    available_out: Sequence[bool]
    saved: list[Var]


Policy = Callable[..., Any]
"""Tells for a primitive, avals and parameters whether to save the results."""

SplitRule = Callable[[Policy, Sequence[bool], Sequence[bool], Equation], Split]
"""Takes the policy, which operands are known only backward, which are there backward,
and the equation."""


def def_split(primitive: Primitive, rule: SplitRule) -> None:
    """Has `jax.checkpoint` split equations of ``primitive`` by ``rule``."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def split_checkpoint(
    policy: Policy,
    unknown_in: Sequence[bool],
    available_in: Sequence[bool],
    equation: Equation,
) -> Split:
    """How JAX splits a `jax.checkpoint` inside of another; see `SplitRule`."""
    split = partial_eval.partial_eval_jaxpr_custom_rules[remat_p]
    return Split(*split(policy, unknown_in, available_in, equation))
