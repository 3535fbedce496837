"""Jaxprs of a map, under the mesh that it runs on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from shardmap._jax.context import equation_context
from shardmap._jax.effects import on_variables
from shardmap._jax.primitives import SHARD_MAP, walked_axes
from shardmap._jax.types import AnyMesh, Atom, Aval, Equation, Jaxpr, Value
from shardmap._jax.walk import rewrite_jaxpr, with_same_constants
from shardmap.map.primitives.map_primitive import is_no_map
from shardmap.sharding.mesh import with_manual_axes


def under_mesh(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr`` as if it had been traced under ``mesh``, an abstract mesh.

    An equation remembers the mesh that it was traced under, and is lowered under it.
    """
    contexts: dict[Any, Any] = {}

    def change(equation: Equation) -> Any:
        params = equation.params
        if equation.primitive is SHARD_MAP:
            if params["mesh"].axis_names != mesh.axis_names:
                return equation  # By the partitioner, on a mesh of its own.
            manual = with_manual_axes(mesh, walked_axes(equation))
            inside = _typed_with(under_mesh(params["jaxpr"], manual), manual)
            params = params | {"mesh": mesh, "jaxpr": inside}
        else:
            params = {key: _on_mesh(value, mesh) for key, value in params.items()}
        if id(equation.ctx) not in contexts:
            contexts[id(equation.ctx)] = equation_context(equation, mesh)
        return equation.replace(params=params, ctx=contexts[id(equation.ctx)])

    # What maps hold is put under a mesh where they are lowered.
    return rewrite_jaxpr(jaxpr, change, is_no_map)


def _on_mesh(value: Value, mesh: AnyMesh) -> Any:
    """A sharding of values inside or around a shard_map, on ``mesh`` instead."""
    if (
        isinstance(value, NamedSharding)
        and isinstance(value.mesh, AbstractMesh)
        and value.mesh.axis_names == mesh.axis_names
    ):
        return NamedSharding(mesh, value.spec)
    return value


def _typed_with(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr``, of a shard_map, whose types name ``mesh`` instead of its own."""

    def retype(aval: Aval) -> Any:
        sharding = _on_mesh(getattr(aval, "sharding", None), mesh)
        return aval if sharding is None else aval.update(sharding=sharding)

    return rewrite_jaxpr(
        jaxpr, lambda e: e, is_no_map, lambda jaxpr: _with_avals(jaxpr, retype)
    )


def _with_avals(jaxpr: Jaxpr, retype: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with other avals for its variables, but not for those further in."""
    made: dict[Any, Any] = {}

    def new(atom: Atom) -> Any:
        if isinstance(atom, jex_core.Literal):
            # The value may have a type of its own.
            value, aval = np.asarray(atom.val), retype(atom.aval)
            return jex_core.Literal(value.item() if aval.weak_type else value, aval)
        if atom not in made:
            made[atom] = jex_core.Var(retype(atom.aval))
        return made[atom]

    def every(atoms: Sequence[Any]) -> list[Any]:
        return list(map(new, atoms))

    return with_same_constants(
        jaxpr,
        constvars=every(jaxpr.constvars),
        invars=every(jaxpr.invars),
        outvars=every(jaxpr.outvars),
        eqns=[
            equation.replace(
                invars=every(equation.invars),
                outvars=every(equation.outvars),
                effects=on_variables(equation.effects, new),
            )
            for equation in jaxpr.eqns
        ],
        effects=on_variables(jaxpr.effects, new),
    )
