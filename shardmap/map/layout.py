"""Where the elements of a mapped axis go: devices and the mesh they form."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap.map.primitive import spmap_p
from shardmap.map.tracing import UNNAMED


def map_mesh(
    axis_name: Hashable,
    axis_size: int,
    call_jaxpr: Any,
    devices: Sequence[jax.Device],
) -> Mesh:
    """The mesh of an outermost map: its own axis, then one for each level inside.

    A level gets a mesh axis as long as the devices last; below that, maps are
    vectorised on each device.

    Args:
      axis_name: the map's axis name, also the mesh's if it is a string.
      axis_size: the number of elements.
      call_jaxpr: what is searched for maps inside.
      devices: the devices to use, at least ``axis_size``.
    """
    names, sizes = [axis_name], [axis_size]
    level = inner_maps(call_jaxpr)
    while level:
        available = len(devices) // math.prod(sizes)
        inner_sizes = {equation.params["axis_size"] for equation in level}
        size = max((s for s in inner_sizes if s <= available), default=None)
        if size is None:
            break
        inner_names = {equation.params["axis_name"] for equation in level}
        names.append(inner_names.pop() if len(inner_names) == 1 else None)
        sizes.append(size)
        level = [
            inner
            for equation in level
            for inner in inner_maps(equation.params["call_jaxpr"])
        ]
    grid = np.asarray(devices[: math.prod(sizes)], dtype=object).reshape(sizes)
    return Mesh(grid, _mesh_axis_names(names))


def _mesh_axis_names(names: Sequence[Hashable]) -> tuple[str, ...]:
    """Strings, as the partitioner wants, all different."""
    chosen: list[str] = []
    for level, name in enumerate(names):
        if not isinstance(name, str) or name == UNNAMED or name in chosen:
            name = f"axis{level}"
        chosen.append(name)
    return tuple(chosen)


def inner_maps(jaxpr: Any) -> list[Any]:
    """The map equations one level down, in whatever other equations hold them."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is spmap_p:
            found.append(equation)
        else:
            for inner in jex_core.jaxprs_in_params(equation.params):
                found.extend(inner_maps(inner))
    return found


def partition_spec(mesh_axis: str, axis: int | None) -> PartitionSpec:
    """The spec of an array whose dimension ``axis`` is the mapped axis."""
    return _spec(_outside(axis, mesh_axis, {}))


class MapShardings(NamedTuple):
    """How the operands and the results of an outermost map lie on its devices."""

    operands: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]


def map_shardings(
    mesh: Mesh,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Any,
) -> MapShardings:
    """The layout of a map and of the maps inside it, as seen from outside.

    An operand that goes straight to a map inside, or a result that comes straight from
    one, is cut along that map's mesh axis too.
    """
    mesh_axis = mesh.axis_names[0]
    operands, results = _inner_cuts(call_jaxpr, mesh, 1)
    return MapShardings(
        *(
            tuple(
                NamedSharding(mesh, _spec(_outside(axis, mesh_axis, cuts)))
                for axis, cuts in zip(axes, inner, strict=True)
            )
            for axes, inner in ((in_axes, operands), (out_axes, results))
        )
    )


_Cuts = dict[int, str]
"""Which dimensions of an array are cut, each along a mesh axis."""


def _inner_cuts(jaxpr: Any, mesh: Mesh, level: int) -> tuple[list[_Cuts], list[_Cuts]]:
    """The cuts that maps at ``level`` make in the inputs and outputs of ``jaxpr``."""
    uses: dict[Any, list[_Cuts]] = {var: [] for var in jaxpr.invars}
    made: dict[Any, _Cuts] = {}
    for equation in jaxpr.eqns:
        params = equation.params
        cuts: Sequence[_Cuts] = [{}] * len(equation.invars)
        if equation.primitive is spmap_p and is_on_mesh(equation, mesh, level):
            operands, results = _inner_cuts(params["call_jaxpr"], mesh, level + 1)
            mesh_axis = mesh.axis_names[level]
            cuts = [
                _outside(axis, mesh_axis, inner)
                for axis, inner in zip(params["in_axes"], operands, strict=True)
            ]
            for var, axis, inner in zip(
                equation.outvars, params["out_axes"], results, strict=True
            ):
                made[var] = _outside(axis, mesh_axis, inner)
        for atom, cut in zip(equation.invars, cuts, strict=True):
            # Literals are not hashable, and never inputs.
            if not isinstance(atom, jex_core.Literal) and atom in uses:
                uses[atom].append(cut)
    outvars = [var for var in jaxpr.outvars if not isinstance(var, jex_core.Literal)]
    for var in outvars:
        if var in uses:
            uses[var].append({})
    agreed = [
        cuts[0] if cuts and all(cut == cuts[0] for cut in cuts) else {}
        for cuts in uses.values()
    ]
    return agreed, [
        {} if isinstance(var, jex_core.Literal) else made.get(var, {})
        for var in jaxpr.outvars
    ]


def is_on_mesh(equation: Any, mesh: Any, level: int) -> bool:
    """Whether a map inside others, ``level`` of them, walks a mesh axis of its own."""
    return (
        level < len(mesh.axis_names)
        and mesh.shape[mesh.axis_names[level]] == equation.params["axis_size"]
    )


def _outside(axis: int | None, mesh_axis: str, cuts: _Cuts) -> _Cuts:
    """The cuts of an array from those that one element sees."""
    if axis is None:
        return cuts
    shifted = {dim + (dim >= axis): name for dim, name in cuts.items()}
    return {axis: mesh_axis, **shifted}


def _spec(cuts: _Cuts) -> PartitionSpec:
    return PartitionSpec(*[cuts.get(dim) for dim in range(max(cuts, default=-1) + 1)])
