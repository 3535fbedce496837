"""`jax.shard_map` inside of maps: where both can be one program.

A shard_map names its mesh. The map around it runs on one too, and each axis of a mesh
can be walked once.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardmap._jax.primitives import SHARD_MAP, is_pmap, walked_axes
from shardmap._jax.types import AnyJaxpr, Equation, Jaxpr
from shardmap._jax.walk import equations
from shardmap.map.primitives.axis import axis_text, map_text
from shardmap.sharding.conversions import axes_in


def axes_used_inside(jaxpr: AnyJaxpr) -> set[str]:
    """The mesh axes that maps and shard_maps in ``jaxpr`` walk, and constraints cut by.

    A map of which no array has the mapped axis only binds a name.
    """
    walked: set[str] = set()
    for equation in equations(jaxpr):
        params = equation.params
        if equation.primitive is SHARD_MAP:
            walked |= walked_axes(equation)
        elif isinstance(sharding := params.get("sharding"), NamedSharding):
            walked |= {
                name
                for entry in sharding.spec
                for name in axes_in(entry)
                if isinstance(name, str)
            }
        elif {*params.get("in_axes", ()), *params.get("out_axes", ())} - {None}:
            walked |= set(params.get("mesh_axes") or ())
    return walked


def has_shard_maps(jaxpr: Jaxpr) -> bool:
    """Whether there is any in ``jaxpr``, at any level."""
    return next(_shard_maps(jaxpr, frozenset()), None) is not None


def _shard_maps(
    jaxpr: AnyJaxpr, walked: frozenset[str]
) -> Iterator[tuple[Equation, frozenset[str]]]:
    """The shard_map equations, and what maps around them walk besides ``walked``."""

    def is_plain(equation: Equation) -> bool:
        return equation.primitive is not SHARD_MAP and not _walked_by_map(equation)

    for equation in equations(jaxpr, is_plain):
        if equation.primitive is SHARD_MAP:
            yield equation, walked
        elif not is_plain(equation):
            inside = equation.params["call_jaxpr"]
            yield from _shard_maps(inside, walked | _walked_by_map(equation))


def _walked_by_map(equation: Equation) -> set[str]:
    return set(equation.params.get("mesh_axes") or ())


def check_shard_maps(params: dict[str, Any]) -> None:
    """Refuses a `jax.shard_map` inside a map that cannot be part of its program.

    Args:
      params: of the map's equation.

    Raises:
      ValueError: names the map, both meshes or the mesh axis.
    """
    mesh, manual = params["mesh"], params["lowering"] == "manual"
    walked = frozenset(params["mesh_axes"] or ()) | set(params["inner_axes"])
    for equation, around in _shard_maps(params["call_jaxpr"], walked):
        inner = equation.params["mesh"]
        if mesh.abstract_mesh.shape_tuple == inner.abstract_mesh.shape_tuple:
            same_mesh = not isinstance(inner, Mesh) or _devices(inner) == _devices(mesh)
            both = sorted(walked_axes(equation) & around)
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
            f"both walk mesh axes {both}"
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
