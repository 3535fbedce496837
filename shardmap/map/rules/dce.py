"""The DCE rule of `spmap`."""

import dataclasses
from collections.abc import Hashable, Sequence
from itertools import compress
from typing import Any

from shardmap._jax.context import bound_axes
from shardmap._jax.effects import NO_AXIS, axis_of
from shardmap._jax.rules import def_dce, without_dead_code
from shardmap._jax.types import Equation, Jaxpr
from shardmap._jax.walk import are_same, per_jaxpr
from shardmap.map.primitives.map_primitive import MapParams, spmap_p


@per_jaxpr
def _without_dead_code(
    jaxpr: Jaxpr,
    used_outputs: tuple[bool, ...],
    axis_name: Hashable,
    axis_size: int,
) -> tuple[Any | None, list[bool]]:
    """The jaxpr that is left, None if nothing is dropped; and its used inputs."""
    # JAX may type-check the new jaxpr.
    with bound_axes({axis_name: axis_size}):
        pruned, used_inputs = without_dead_code(jaxpr, used_outputs)
    is_whole = all(used_outputs) and all(used_inputs)
    is_same = is_whole and are_same(pruned.eqns, jaxpr.eqns)
    return None if is_same else pruned, used_inputs


def _dce_rule(
    used_outputs: Sequence[bool], equation: Equation
) -> tuple[list[bool], Equation | None]:
    # The use of an axis name is no visible effect.
    is_seen = any(axis_of(effect) is NO_AXIS for effect in equation.effects)
    if not any(used_outputs) and not is_seen:
        return [False] * len(equation.invars), None
    params = MapParams.of(equation)
    call_jaxpr, used_inputs = _without_dead_code(
        params.call_jaxpr, tuple(used_outputs), params.axis_name, params.axis_size
    )
    if call_jaxpr is None:
        return used_inputs, equation
    live = dataclasses.replace(
        params,
        call_jaxpr=call_jaxpr,
        in_axes=tuple(compress(params.in_axes, used_inputs)),
        out_axes=tuple(compress(params.out_axes, used_outputs)),
    )
    gone = params.call_jaxpr.effects - call_jaxpr.effects
    return used_inputs, equation.replace(
        invars=list(compress(equation.invars, used_inputs)),
        outvars=list(compress(equation.outvars, used_outputs)),
        params=live.as_dict(),
        effects=equation.effects - gone,
    )


def_dce(spmap_p, _dce_rule)
