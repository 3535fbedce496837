"""JAX's tables of rules for vmap, dead code, `jax.checkpoint` and the type checker."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax._src import core
from jax.extend.core.primitives import remat_p
from jax.interpreters import batching, partial_eval

from shardmap._jax.types import Equation, Jaxpr, Param, Primitive, Value, Var

# Vectorisation


class Vmap(NamedTuple):
    """A vmap, such as that which a batching rule is for.

    Attributes:
      name: of its axis; an object of JAX's if it has none.
      size: the number of elements.
      spmd_name: the mesh axis, or axes, of ``spmd_axis_name``; None: none.
    """

    name: Hashable
    size: int
    spmd_name: Any = None

    def vectorize(
        self, fun: Callable[..., Any], in_dims: Sequence[int | None], out_dims: Any
    ) -> Callable[..., Any]:
        """`jax.vmap` of ``fun``; all operands may be unmapped.

        JAX's own batching rules must know its collectives over this axis.
        """
        vmap = functools.partial(
            jax.vmap, out_axes=out_dims, axis_name=self.name, axis_size=self.size
        )
        if any(dim is not None for dim in in_dims):
            return vmap(fun, in_axes=tuple(in_dims))
        # jax.vmap requires a mapped operand.
        mapped = vmap(lambda _, *args: fun(*args), in_axes=(0, *in_dims))
        # In `jax.export` the size may be a symbol, which NumPy does not know.
        zeros = np.zeros if isinstance(self.size, int) else jnp.zeros
        return lambda *args: mapped(zeros(self.size, bool), *args)


Dims = Sequence[int | None]
Batched = tuple[Any, Any]
"""The results of a rule, and the batch dimension of each; None: not batched."""


def def_batching(primitive: Primitive, rule: Callable[..., Batched]) -> None:
    """Registers a batching rule that knows its vmap.

    It takes a `Vmap`, the operands, the batch dimension of each, and the parameters.
    Unlike the rules in JAX's public table, it is called if no operand is batched, too.
    """

    def batch(
        axis_data: Any, args: Sequence[Value], dims: Dims, **params: Param
    ) -> Any:
        vmap = Vmap(axis_data.name, axis_data.size, axis_data.spmd_name)
        return rule(vmap, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batch


# Dead code

DeadCodeRule = Callable[[Sequence[bool], Equation], tuple[list[bool], Equation | None]]
"""Takes which results are used, and the equation. Returns which operands are used, and
the equation that is left, if any."""


def def_dce(primitive: Primitive, rule: DeadCodeRule) -> None:
    """Registers the rule that removes dead code from equations of ``primitive``."""

    def dce(used_outputs: Sequence[bool], *rest: object) -> Any:
        equation: Any = rest[-1]  # From JAX 0.12 on, the live inputs come before it.
        return rule(used_outputs, equation)

    partial_eval.dce_rules[primitive] = dce


def without_dead_code(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> Any:
    """The jaxpr with only the used outputs, and which inputs these need."""
    pruned, used_inputs = partial_eval.dce_jaxpr(jaxpr, used_outputs)
    # A copy, as JAX may return the jaxpr that its cache has this result for.
    return pruned.replace(), used_inputs


# Rematerialisation


class Split(NamedTuple):
    """An equation under `jax.checkpoint`, split in a forward and a backward one.

    Attributes:
      forward, backward: the equations; either may be None.
      unknown_out: which results the forward equation does not compute.
      available_out: which results the backward equation computes.
      saved: the variables that are saved between them.
    """

    forward: Equation | None
    backward: Equation | None
    unknown_out: Sequence[bool]
    available_out: Sequence[bool]
    saved: list[Var]


Policy = Callable[..., Any]
"""Whether to save the results of a primitive, given avals and parameters."""

SplitRule = Callable[[Policy, Sequence[bool], Sequence[bool], Equation], Split]
"""Takes the policy, which operands are unknown forward, which are available backward,
and the equation."""


def def_partial_eval_custom(primitive: Primitive, rule: SplitRule) -> None:
    """Registers the rule by which `jax.checkpoint` splits ``primitive``."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = rule


def split_checkpoint(
    policy: Policy,
    unknown_in: Sequence[bool],
    available_in: Sequence[bool],
    equation: Equation,
) -> Split:
    """JAX's rule for a `jax.checkpoint` inside another; see `SplitRule`."""
    split = partial_eval.partial_eval_jaxpr_custom_rules[remat_p]
    return Split(*split(policy, unknown_in, available_in, equation))


# Type checks

# With ``jax_enable_checks``, JAX checks the jaxprs that it makes, and the jaxprs in
# their equations, without the axes that these bind. A primitive that binds axes needs a
# rule of its own, in a private table.

Typed = tuple[Sequence[Any], Any]
"""The avals of an equation's results, and its effects."""


def register_typecheck(primitive: Primitive, check: Callable[..., Typed]) -> None:
    """Registers the rule that checks equations of ``primitive``.

    It takes the operands, with an ``aval`` each, and the parameters. JAX adds the
    equation to its errors.
    """

    def typecheck(_: object, *operands: Value, **params: Param) -> Typed:
        try:
            return check(*operands, **params)
        except jex_core.JaxprTypeError:
            raise
        except (TypeError, ValueError) as error:
            raise jex_core.JaxprTypeError(str(error)) from error

    core.custom_typechecks[primitive] = typecheck
