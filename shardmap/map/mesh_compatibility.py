"""Which meshes can be those of one program.

A map and the maps inside it run on one mesh, and share no mesh axis. XLA has to combine
the meshes of all maps and arguments of a program.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from jax.sharding import Mesh

from shardmap._jax.primitives import SHARD_MAP, is_pmap, manual_axes_of
from shardmap._jax.types import Equation
from shardmap._jax.walk import equations, primitives_in
from shardmap.map.layout import inner_maps
from shardmap.map.primitives.axis import axis_text
from shardmap.map.primitives.map_primitive import MapParams, is_no_map
from shardmap.sharding.mesh import group_counts, mesh_devices, sizes_of_groups

# What a map holds


def check_inside(
    params: MapParams,
    outermost: MapParams | None = None,
    used: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses maps and shard_maps inside a map that cannot be part of its program.

    ``used`` has the mesh axes of the maps around, with the names of these.
    """
    outermost = outermost or params
    for mesh_axis in params.mesh_axes or ():
        if mesh_axis in used:
            raise ValueError(
                f"{params} uses mesh axes {params.mesh_axes}, but the "
                f"map of {used[mesh_axis]} around it uses {mesh_axis!r} already. Give "
                "each of them axes of its own."
            )
        used = {**used, mesh_axis: params.name}
    if SHARD_MAP in primitives_in(params.call_jaxpr):
        for equation in equations(params.call_jaxpr, is_no_map):
            if equation.primitive is SHARD_MAP:
                _check_shard_map(equation, outermost, {*used, *outermost.inner_axes})
    for inner in inner_maps(params.call_jaxpr):
        if inner.mesh is not None and inner.mesh != outermost.mesh:
            raise ValueError(
                f"{inner} names the mesh {inner.mesh}, but the map of {params.name} "
                f"around it runs on {outermost.mesh}. Nested maps are one program: "
                "give both of them mesh= and mesh_axes= of one mesh."
            )
        check_inside(inner, outermost, used)


def _check_shard_map(equation: Equation, params: MapParams, used: set[str]) -> None:
    """Refuses a `jax.shard_map` inside a map on another mesh, or along axes in use."""
    mesh, manual = cast(Mesh, params.mesh), params.lowering == "manual"
    inner = equation.params["mesh"]
    is_abstract = not isinstance(inner, Mesh)
    same_devices = is_abstract or mesh_devices(inner) == mesh_devices(mesh)
    same_axes = mesh.abstract_mesh.shape_tuple == inner.abstract_mesh.shape_tuple
    both = sorted(manual_axes_of(equation) & used) if same_axes else []
    if same_axes and same_devices and not (manual and both):
        return
    other_way = ""
    if same_devices and not is_abstract:
        if not manual:
            return
        other_way = ", or give spmap lowering='spmd'"
    where = f"{params} over {axis_text(params.axis_name)}"
    if is_pmap(equation):
        raise ValueError(
            f"{where} and the jax.pmap inside it cannot be one program, as each "
            "names devices of its own. Put shardmap.spmap in place of jax.pmap."
        )
    problem = (
        f"both use mesh axes {both}"
        if both
        else f"the map runs on {mesh}, the shard_map on {inner}"
    )
    raise ValueError(
        f"{where} and the jax.shard_map inside it cannot be one program: {problem}. "
        "Give spmap the same mesh= and mesh_axes= which shard_map's axis_names= leave "
        f"out{other_way}, or put shardmap.spmap in place of jax.shard_map."
    )


# Several meshes in one program

# XLA combines the meshes of a program into one. If neither has all cuts of the other,
# such as 4 x 2 and 2 x 4, it aborts the process: with two manual maps, or with a map
# that is manual along some axes and an argument on the other mesh.


_meshes: weakref.WeakKeyDictionary[object, dict[Mesh, str]] = (
    weakref.WeakKeyDictionary()
)
"""The meshes of the maps in each program that is being lowered, and their names."""


def check_meshes(
    program: Any, name: str, mesh: Mesh, arguments: Iterable[Sequence[int]]
) -> None:
    """Refuses a map whose mesh XLA cannot combine with those of its program.

    The program is an object that lives as long as it is lowered. If the map is manual
    along some axes only, ``arguments`` has the axis sizes of their meshes.
    """
    meshes = _meshes.setdefault(program, {})
    ours = tuple(mesh.shape.values())
    others: list[tuple[str, Sequence[int]]] = [
        (other, m.devices.shape) for m, other in meshes.items()
    ]
    others += [("an argument", sizes) for sizes in arguments]
    cuts = group_counts(ours)
    for other, theirs in others:
        other_cuts = group_counts(theirs)
        is_elsewhere = max(cuts) != max(other_cuts)
        if is_elsewhere or cuts <= other_cuts or other_cuts <= cuts:
            continue
        advice = "Put each into a jax.jit of its own"
        if sizes := sizes_of_groups(cuts | other_cuts):
            advice = (
                f"Give all maps and arguments meshes with axes of sizes {sizes}, "
                "several axes to a map where it needs them"
            )
        raise NotImplementedError(
            f"{name} runs on {_text(ours)}, {other} of the same program on "
            f"{_text(theirs)}: XLA cannot cut one program both ways. {advice}, or call "
            "the map outside of your own jax.jit and jax.set_mesh."
        )
    meshes.setdefault(mesh, name)


def _text(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) + " devices"
