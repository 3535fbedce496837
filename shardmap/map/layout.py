"""Where the elements of a mapped axis go: devices, and blocks of elements on each.

An outermost map makes a mesh, or is given one. In a mesh that it makes, the first axis
is its own, others are for the maps inside it, one for each level of nesting, and the
last ones for the partitions that `sharded_jit` cuts values into.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap.map import processes
from shardmap.map.constraints import (
    axes_for_partitions,
    constrain_p,
    partition_cuts,
)
from shardmap.map.names import UNNAMED
from shardmap.map.primitive import spmap_p


def devices_for(axis_size: int, available: int) -> int:
    """How many devices an axis lies on: no more than its blocks need."""
    axis_size = max(axis_size, 1)
    return -(-axis_size // -(-axis_size // available))


def _even_devices_for(axis_size: int, available: int) -> int:
    """How many devices an axis lies on in equal blocks: as many as divide it."""
    return max(n for n in range(1, available + 1) if axis_size % n == 0)


class MeshWalk(NamedTuple):
    """Where a map goes on a mesh.

    Attributes:
      mesh_axes: the mesh axes that its elements are laid over, major to minor.
      inner_axes: those for the maps inside that say nothing, one for each level.
    """

    mesh_axes: tuple[str, ...]
    inner_axes: tuple[str, ...]

    def device_count(self, mesh: Any) -> int:
        """How many devices share the elements."""
        return math.prod(mesh.shape[name] for name in self.mesh_axes)

    def block(self, mesh: Any, axis_size: int) -> int:
        """How many elements a device has, at most."""
        return -(-axis_size // self.device_count(mesh))


def map_mesh(
    axis_name: Hashable,
    axis_size: int,
    call_jaxpr: Any,
    devices: Sequence[jax.Device],
) -> Mesh:
    """The mesh that an outermost map makes: its own axis, then one for each level.

    Axes for partitions come last, and take their devices first. A level gets a mesh
    axis as long as there are devices left; below that, maps are vectorised on each
    device. Over several processes each has an equal part of the elements, in equal
    blocks on its devices.

    Args:
      axis_name: the map's axis name, also the mesh's if it is a string.
      axis_size: the number of elements.
      call_jaxpr: what is searched for maps inside.
      devices: the devices to use.
    """
    groups = processes.by_process(devices)
    if axis_size % len(groups) == 0:
        # Each process lays its own rows on its own devices.
        axis_size //= len(groups)
    else:
        groups = [list(devices)]
    spread = _even_devices_for if len(groups) > 1 else devices_for
    available = len(groups[0])
    partitions = axes_for_partitions(call_jaxpr, axis_name, axis_size, available)
    count = available // math.prod(partitions.values())
    names, sizes = [axis_name], [spread(axis_size, count)]
    level = inner_maps(call_jaxpr)
    while level:
        available = count // math.prod(sizes)
        size = max(devices_for(e.params["axis_size"], available) for e in level)
        if size == 1:
            break
        inner_names = {equation.params["axis_name"] for equation in level}
        names.append(inner_names.pop() if len(inner_names) == 1 else None)
        sizes.append(size)
        level = [
            inner
            for equation in level
            for inner in inner_maps(equation.params["call_jaxpr"])
        ]
    own = _mesh_axis_names(names, {axis_name} | _axis_names(call_jaxpr))
    sizes += partitions.values()
    used = [device for group in groups for device in group[: math.prod(sizes)]]
    sizes[0] *= len(groups)
    grid = np.asarray(used, dtype=object).reshape(sizes)
    return Mesh(grid, (*own, *partitions))


def _mesh_axis_names(
    names: Sequence[Hashable], taken: set[Hashable]
) -> tuple[str, ...]:
    """Strings, as the partitioner wants, all different.

    A name that is not the map's own is one that no map has: another map's collectives
    would mean that one.
    """
    chosen: list[str] = []
    for level, name in enumerate(names):
        if not isinstance(name, str) or name == UNNAMED or name in chosen:
            numbered = (f"axis{k}" for k in itertools.count(level))
            name = next(n for n in numbered if n not in taken and n not in chosen)
        chosen.append(name)
    return tuple(chosen)


def _axis_names(jaxpr: Any) -> set[Hashable]:
    """The names of all maps inside, at every level."""
    names: set[Hashable] = set()
    for equation in inner_maps(jaxpr):
        names |= {equation.params["axis_name"]}
        names |= _axis_names(equation.params["call_jaxpr"])
    return names


def inner_maps(jaxpr: Any) -> list[Any]:
    """The map equations one level down, in whatever other equations hold them."""
    found = []
    # Jaxprs are shared: a jitted function that is called twice has one.
    waiting, seen = [jaxpr], {id(jaxpr)}
    while waiting:
        for equation in waiting.pop().eqns:
            if equation.primitive is spmap_p:
                found.append(equation)
                continue
            for inner in jex_core.jaxprs_in_params(equation.params):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    waiting.append(inner)
    return found


def inner_walk(equation: Any, mesh: Any, inner_axes: Sequence[str]) -> MeshWalk | None:
    """Where a map inside another goes; None: it is vectorised on each device.

    Args:
      equation: the inner map's.
      mesh: the outermost map's.
      inner_axes: the mesh axes left for maps that say nothing.
    """
    if equation.params["mesh_axes"] is not None:
        return MeshWalk(equation.params["mesh_axes"], tuple(inner_axes))
    if not inner_axes:
        return None
    devices = mesh.shape[inner_axes[0]]
    if devices_for(equation.params["axis_size"], devices) != devices:
        return None
    return MeshWalk((inner_axes[0],), tuple(inner_axes[1:]))


def check_inner_meshes(params: dict[str, Any]) -> None:
    """Refuses maps inside a map that name another mesh, or mesh axes in use.

    Args:
      params: the parameters of the outer map's equation.

    Raises:
      ValueError: names both maps, and their meshes or axes.
    """
    _check_inner_meshes(params, params["mesh"], {})


def _check_inner_meshes(
    params: dict[str, Any], mesh: Mesh, used: dict[str, str]
) -> None:
    name = params["name"]
    for mesh_axis in params["mesh_axes"] or ():
        if mesh_axis in used:
            raise ValueError(
                f"spmap of {name} walks mesh axes {params['mesh_axes']}, but the map "
                f"of {used[mesh_axis]} around it walks {mesh_axis!r} already. Give "
                "each of them axes of its own."
            )
        used = used | {mesh_axis: name}
    for equation in inner_maps(params["call_jaxpr"]):
        wanted = equation.params["mesh"]
        if wanted is not None and wanted != mesh:
            raise ValueError(
                f"spmap of {equation.params['name']} names the mesh {wanted}, but the "
                f"map of {name} around it runs on {mesh}. Nested maps are one program: "
                "give both of them mesh= and mesh_axes= of one mesh."
            )
        _check_inner_meshes(equation.params, mesh, used)


# How arrays lie


class MapShardings(NamedTuple):
    """How the operands and the results of an outermost map lie on its devices."""

    operands: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]


def map_shardings(params: dict[str, Any]) -> MapShardings:
    """The layout of a map and of the maps inside it, as seen from outside.

    An operand that goes straight to a map inside, or a result that comes straight from
    one, is cut along that map's mesh axes too, and the same for partitions. A
    dimension that does not divide among its devices is whole on all of them, as JAX
    has no arrays with uneven shards.

    Args:
      params: the parameters of the map's equation.
    """
    mesh = params["mesh"]
    walk = MeshWalk(params["mesh_axes"], params["inner_axes"])
    operands, results = _map_cuts(params, mesh, walk)
    # XLA gives every device the whole of a result without entries.
    results = [
        cut if params["axis_size"] * math.prod(var.aval.shape) else {}
        for var, cut in zip(params["call_jaxpr"].outvars, results, strict=True)
    ]
    return MapShardings(
        *(
            tuple(NamedSharding(mesh, _spec(cut)) for cut in cuts)
            for cuts in (operands, results)
        )
    )


def partition_spec(mesh_axes: tuple[str, ...], axis: int | None) -> PartitionSpec:
    """The spec of an array whose dimension ``axis`` is cut along ``mesh_axes``."""
    return _spec({} if axis is None else {axis: mesh_axes})


_Cuts = dict[int, tuple[str, ...]]
"""Which dimensions of an array are cut, each along some mesh axes."""


def _spec(cuts: _Cuts) -> PartitionSpec:
    entries: list[Any] = [None] * (max(cuts, default=-1) + 1)
    for dimension, mesh_axes in cuts.items():
        entries[dimension] = mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes
    return PartitionSpec(*entries)


def _map_cuts(
    params: dict[str, Any], mesh: Any, walk: MeshWalk
) -> tuple[list[_Cuts], list[_Cuts]]:
    """The cuts of a map's operands and results, maps inside included."""
    divides = params["axis_size"] % walk.device_count(mesh) == 0

    def outside(axis: int | None, cuts: _Cuts) -> _Cuts:
        if axis is None:
            return cuts
        shifted = {dim + (dim >= axis): names for dim, names in cuts.items()}
        own = {axis: walk.mesh_axes} if divides and walk.mesh_axes else {}
        return own | shifted

    operands, results = _element_cuts(params["call_jaxpr"], mesh, walk.inner_axes)
    return (
        list(map(outside, params["in_axes"], operands)),
        list(map(outside, params["out_axes"], results)),
    )


def _element_cuts(
    jaxpr: Any, mesh: Any, inner_axes: Sequence[str]
) -> tuple[list[_Cuts], list[_Cuts]]:
    """The cuts that maps and constraints make in the inputs and outputs."""
    uses: dict[Any, list[_Cuts]] = {var: [] for var in jaxpr.invars}
    made: dict[Any, _Cuts] = {}
    for equation in jaxpr.eqns:
        cuts: Sequence[_Cuts] = [{}] * len(equation.invars)
        if equation.primitive is spmap_p:
            walk = inner_walk(equation, mesh, inner_axes) or MeshWalk((), ())
            cuts, results = _map_cuts(equation.params, mesh, walk)
            made.update(zip(equation.outvars, results, strict=True))
        elif equation.primitive is constrain_p:
            cuts = [partition_cuts(equation.params["parts"], mesh)]
            made[equation.outvars[0]] = cuts[0]
        for atom, cut in zip(equation.invars, cuts, strict=True):
            # Literals are not hashable, and never inputs.
            if not isinstance(atom, jex_core.Literal) and atom in uses:
                uses[atom].append(cut)
    for atom in jaxpr.outvars:
        if not isinstance(atom, jex_core.Literal) and atom in uses:
            uses[atom].append({})
    agreed = [
        cuts[0] if cuts and all(cut == cuts[0] for cut in cuts) else {}
        for cuts in uses.values()
    ]
    return agreed, [
        {} if isinstance(atom, jex_core.Literal) else made.get(atom, {})
        for atom in jaxpr.outvars
    ]
