"""Equations and jaxprs as if traced under the mesh that a map runs on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from shardmap._jax.context import equation_context
from shardmap._jax.effects import on_variables
from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import AnyMesh, Atom, Aval, Equation, Jaxpr, Value
from shardmap._jax.walk import with_same_constants


def retraced_equation(equation: Equation, mesh: AnyMesh) -> Any:
    """An equation, whose jaxprs are so already, as if traced under an abstract mesh."""
    params = equation.params
    if equation.primitive is not SHARD_MAP:
        params = {key: _on_mesh(value, mesh) for key, value in params.items()}
    elif params["mesh"].axis_names == mesh.axis_names:
        params = params | {"mesh": mesh}
    else:
        return equation  # It has a mesh of its own.
    return equation.replace(params=params, ctx=equation_context(equation.ctx, mesh))


def _on_mesh(value: Value, mesh: AnyMesh) -> Any:
    """A sharding on an abstract mesh with these axis names, on ``mesh`` instead."""
    if (
        isinstance(value, NamedSharding)
        and isinstance(value.mesh, AbstractMesh)
        and value.mesh.axis_names == mesh.axis_names
    ):
        return NamedSharding(mesh, value.spec)
    return value


def with_mesh_in_types(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr``, in a shard_map, with ``mesh`` in the types of its variables."""

    def retype(aval: Aval) -> Any:
        sharding = _on_mesh(getattr(aval, "sharding", None), mesh)
        return aval if sharding is None else aval.update(sharding=sharding)

    return _with_avals(jaxpr, retype)


def _with_avals(jaxpr: Jaxpr, retype: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with other avals for its variables, but not in inner jaxprs."""
    variables: dict[Any, Any] = {}

    def new(atom: Atom) -> Any:
        if isinstance(atom, jex_core.Literal):
            # A JAX array would keep its own type.
            value, aval = np.asarray(atom.val), retype(atom.aval)
            return jex_core.Literal(value.item() if aval.weak_type else value, aval)
        if atom not in variables:
            variables[atom] = jex_core.Var(retype(atom.aval))
        return variables[atom]

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
