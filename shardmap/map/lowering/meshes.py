"""The mesh that a map runs on: jaxprs under it, and several in one program."""

import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardmap._jax.context import equation_context
from shardmap._jax.effects import on_variables
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of
from shardmap._jax.types import AnyMesh, Atom, Aval, Equation, Jaxpr, Value
from shardmap._jax.walk import rewrite_jaxpr, with_same_constants
from shardmap.map.contexts import CutOtherwise
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


# XLA combines the meshes of a program into one. If neither has all cuts of the other,
# such as 4 x 2 and 2 x 4, it aborts the process: with two manual maps, or with a map
# that is manual along some axes and an argument on the other mesh.


class _Lowered(threading.local):
    """The program that this thread lowers, and the names of maps by mesh."""

    program: Any = None
    meshes: dict[Mesh, str]


_lowered = _Lowered()


def check_meshes(program: Any, name: str, mesh: Mesh) -> None:
    """Refuses a map whose mesh XLA cannot combine with those of other maps.

    Args:
      program: an object that identifies the program.
      name: of the map, for errors.
      mesh: of the map.

    Raises:
      CutOtherwise: names both functions, both meshes and a mesh for both.
    """
    if _lowered.program is not program:
        _lowered.program, _lowered.meshes = program, {}
    for other, other_name in _lowered.meshes.items():
        ours, theirs = tuple(mesh.shape.values()), tuple(other.shape.values())
        if sizes := _sizes_for_both(ours, theirs):
            raise CutOtherwise(
                f"{name} runs on {_text(ours)}, {other_name} in the "
                f"same program on {_text(theirs)}: XLA cannot cut one program both "
                "ways. Give all maps of the program mesh= and mesh_axes= of one mesh "
                f"with axes of sizes {sizes}, several axes to a map where it "
                "needs them, or call them outside of your own jax.jit."
            )
    _lowered.meshes.setdefault(mesh, name)


def check_arguments(name: str, mesh: Mesh, meshes: Iterable[Sequence[int]]) -> None:
    """Refuses a map whose mesh XLA cannot combine with those of arguments.

    Args:
      name: of the map, for errors.
      mesh: of the map, which is manual along some axes.
      meshes: the axis sizes of the meshes of the program's arguments.

    Raises:
      CutOtherwise: names the function, both meshes and a mesh for the argument.
    """
    ours = tuple(mesh.shape.values())
    for theirs in meshes:
        if sizes := _sizes_for_both(ours, theirs):
            raise CutOtherwise(
                f"{name} runs on {_text(ours)}, and an argument of the program is on a "
                f"mesh of {_text(theirs)}: XLA cannot cut one program both ways. Put "
                f"the argument on a mesh with axes of sizes {sizes}, or call the map "
                "outside of your own jax.jit and jax.set_mesh."
            )


def _sizes_for_both(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The axis sizes of a mesh with the cuts of both; empty if one has them all."""
    cuts, other_cuts = _cuts(a), _cuts(b)
    if max(cuts) != max(other_cuts) or cuts <= other_cuts or other_cuts <= cuts:
        return ()
    both = sorted(cuts | other_cuts)
    return tuple(b // a for a, b in itertools.pairwise(both))


def _cuts(sizes: Sequence[int]) -> set[int]:
    """The numbers of groups of devices along the first axis, first two axes, ..."""
    return {1, *itertools.accumulate(sizes, operator.mul)}


def _text(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) + " devices"
