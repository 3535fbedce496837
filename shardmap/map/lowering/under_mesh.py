"""Jaxprs as if traced under the mesh that a map runs on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from shardmap._jax.context import equation_context
from shardmap._jax.effects import on_variables
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.types import AnyMesh, Atom, Aval, Equation, Jaxpr, Value
from shardmap._jax.walk import rewrite_jaxpr, with_same_constants
from shardmap.map.primitives.map_primitive import is_no_map
from shardmap.sharding.mesh import with_manual_axes


def under_mesh(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """``jaxpr`` as if traced under an abstract mesh.

    An equation is lowered under the mesh that it was traced under.
    """
    contexts: dict[Any, Any] = {}

    def change(equation: Equation) -> Any:
        params = equation.params
        if equation.primitive is SHARD_MAP:
            if params["mesh"].axis_names != mesh.axis_names:
                return equation  # It has a mesh of its own.
            manual = with_manual_axes(mesh, manual_axes_of(equation))
            inside = _typed_with(under_mesh(params["jaxpr"], manual), manual)
            params = params | {"mesh": mesh, "jaxpr": inside}
        else:
            params = {key: _on_mesh(value, mesh) for key, value in params.items()}
        if id(equation.ctx) not in contexts:
            contexts[id(equation.ctx)] = equation_context(equation, mesh)
        return equation.replace(params=params, ctx=contexts[id(equation.ctx)])

    # The bodies of maps get their mesh when these are lowered.
    return rewrite_jaxpr(jaxpr, change, is_no_map)


def _on_mesh(value: Value, mesh: AnyMesh) -> Any:
    """A sharding on an abstract mesh with these axis names, on ``mesh`` instead."""
    if (
        isinstance(value, NamedSharding)
        and isinstance(value.mesh, AbstractMesh)
        and value.mesh.axis_names == mesh.axis_names
    ):
        return NamedSharding(mesh, value.spec)
    return value


def _typed_with(jaxpr: Jaxpr, mesh: AnyMesh) -> Any:
    """The jaxpr of a shard_map with ``mesh`` in its types."""

    def retype(aval: Aval) -> Any:
        sharding = _on_mesh(getattr(aval, "sharding", None), mesh)
        return aval if sharding is None else aval.update(sharding=sharding)

    return rewrite_jaxpr(
        jaxpr, lambda e: e, is_no_map, lambda jaxpr: _with_avals(jaxpr, retype)
    )


def _with_avals(jaxpr: Jaxpr, retype: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with other avals for its variables, but not in inner jaxprs."""
    made: dict[Any, Any] = {}

    def new(atom: Atom) -> Any:
        if isinstance(atom, jex_core.Literal):
            # A JAX array would keep its own type.
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
