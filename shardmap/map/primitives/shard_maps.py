"""`jax.shard_map` inside a map: whether both can be one program.

Both name a mesh, and each of its axes can be manual once.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardmap._jax.primitives import SHARD_MAP, is_pmap, manual_axes_of
from shardmap._jax.types import AnyJaxpr, Equation, Jaxpr
from shardmap._jax.walk import equations
from shardmap.map.primitives.axis import axis_text, map_text
from shardmap.sharding.conversions import axes_in


def axes_used_inside(jaxpr: AnyJaxpr) -> set[str]:
    """The mesh axes that maps, shard_maps and constraints in ``jaxpr`` use.

    A map of which no array has the mapped axis only binds a name.
    """
    used: set[str] = set()
    for equation in equations(jaxpr):
        params = equation.params
        if equation.primitive is SHARD_MAP:
            used |= manual_axes_of(equation)
        elif isinstance(sharding := params.get("sharding"), NamedSharding):
            used |= {
                name
                for entry in sharding.spec
                for name in axes_in(entry)
                if isinstance(name, str)
            }
        elif {*params.get("in_axes", ()), *params.get("out_axes", ())} - {None}:
            used |= _map_axes(equation)
    return used


def has_shard_maps(jaxpr: Jaxpr) -> bool:
    """Whether there is any in ``jaxpr``, at any level."""
    return next(_shard_maps(jaxpr, frozenset()), None) is not None


def _shard_maps(
    jaxpr: AnyJaxpr, used: frozenset[str]
) -> Iterator[tuple[Equation, frozenset[str]]]:
    """The shard_map equations, each with ``used`` and the axes of maps around it."""

    def is_plain(equation: Equation) -> bool:
        return equation.primitive is not SHARD_MAP and not _map_axes(equation)

    for equation in equations(jaxpr, is_plain):
        if equation.primitive is SHARD_MAP:
            yield equation, used
        elif not is_plain(equation):
            inside = equation.params["call_jaxpr"]
            yield from _shard_maps(inside, used | _map_axes(equation))


def _map_axes(equation: Equation) -> set[str]:
    """The mesh axes of a map; none of another equation."""
    return set(equation.params.get("mesh_axes") or ())


def check_shard_maps(params: dict[str, Any]) -> None:
    """Refuses a `jax.shard_map` inside a map that cannot be part of its program.

    Args:
      params: of the map's equation.

    Raises:
      ValueError: names the map, both meshes or the mesh axis.
    """
    mesh, manual = params["mesh"], params["lowering"] == "manual"
    used = frozenset(params["mesh_axes"] or ()) | set(params["inner_axes"])
    for equation, around in _shard_maps(params["call_jaxpr"], used):
        inner = equation.params["mesh"]
        if mesh.abstract_mesh.shape_tuple == inner.abstract_mesh.shape_tuple:
            same_mesh = not isinstance(inner, Mesh) or _devices(inner) == _devices(mesh)
            both = sorted(manual_axes_of(equation) & around)
        else:
            same_mesh, both = False, []
        if same_mesh and not (manual and both):
            continue
        if isinstance(inner, Mesh) and _devices(inner) == _devices(mesh):
            if not manual:
                continue
            other_way = ", or give spmap lowering='spmd'"
        else:
            other_way = ""
        if is_pmap(equation):
            raise ValueError(
                f"{map_text(params)} over {axis_text(params['axis_name'])} and the "
                "jax.pmap inside it cannot be one program, as each names devices of "
                "its own. Put shardmap.spmap in place of jax.pmap: nested maps share "
                "the devices."
            )
        problem = (
            f"both use mesh axes {both}"
            if both
            else f"the map runs on {mesh}, the shard_map on {inner}"
        )
        raise ValueError(
            f"{map_text(params)} over {axis_text(params['axis_name'])} and the "
            f"jax.shard_map inside it cannot be one program: {problem}. Give spmap "
            "the same mesh= and mesh_axes= which shard_map's axis_names= leave out"
            f"{other_way}, or put shardmap.spmap in place of jax.shard_map."
        )


def _devices(mesh: Mesh) -> list[jax.Device]:
    return list(mesh.devices.flat)
