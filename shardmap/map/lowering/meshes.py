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
    """``jaxpr`` as if it had been traced under ``mesh``, an abstract mesh.

    An equation remembers the mesh that it was traced under, and is lowered under it.
    """
    contexts: dict[Any, Any] = {}

    def change(equation: Equation) -> Any:
        params = equation.params
        if equation.primitive is SHARD_MAP:
            if params["mesh"].axis_names != mesh.axis_names:
                return equation  # By the partitioner, on a mesh of its own.
            manual = with_manual_axes(mesh, manual_axes_of(equation))
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


# Several meshes in one program. XLA takes them apart into one. Where neither has all
# the cuts of the other, such as 4 x 2 and 2 x 4, it ends the whole process: if maps on
# both are written per device, or a map is that only along some axes and an argument is
# on the other mesh.


class _Lowered(threading.local):
    """The program that a thread lowers, and the meshes in it with their maps' names."""

    program: Any = None
    meshes: dict[Mesh, str]


_lowered = _Lowered()


def check_meshes(program: Any, name: str, mesh: Mesh) -> None:
    """Refuses a map whose mesh cannot be one with those of other maps.

    Args:
      program: any object that there is one of for each program that is lowered.
      name: what to call the map.
      mesh: that the map runs on.

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
    """Refuses a map per device along some axes, where arguments are cut otherwise.

    Args:
      name: what to call the map.
      mesh: that the map runs on.
      meshes: the sizes of the axes of those that arguments of the program are on.

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
    """The axes of a mesh that has the cuts of both; none if one of them has."""
    cuts, other_cuts = _cuts(a), _cuts(b)
    if max(cuts) != max(other_cuts) or cuts <= other_cuts or other_cuts <= cuts:
        return ()
    both = sorted(cuts | other_cuts)
    return tuple(b // a for a, b in itertools.pairwise(both))


def _cuts(sizes: Sequence[int]) -> set[int]:
    """Into how many groups the devices are cut by the first axis, first two, ..."""
    return {1, *itertools.accumulate(sizes, operator.mul)}


def _text(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) + " devices"
