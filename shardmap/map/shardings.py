"""The shardings of a map's operands and results."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex_core
from jax.sharding import NamedSharding, PartitionSpec

from shardmap._jax.types import AnyMesh, Jaxpr
from shardmap.arrays import placement
from shardmap.map.layout import PARTITIONED, MeshPlacement, inner_placement
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.sharding.conversions import cut_spec


class MapShardings(NamedTuple):
    """The shardings of an outermost map's operands and results."""

    operands: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]


def map_shardings(params: dict[str, Any]) -> MapShardings:
    """The shardings of a map, including those of maps inside.

    An operand that a map inside takes as it is, or a result of one, is cut along that
    map's mesh axes too, and likewise for partitions. A dimension that does not divide
    among its devices is replicated, as JAX has no uneven shards.

    Args:
      params: the parameters of the map's equation.
    """
    mesh = params["mesh"]
    operands, results = _map_cuts(params, mesh, MeshPlacement.of(params))
    # XLA replicates results without entries.
    results = [
        cut if params["axis_size"] * math.prod(var.aval.shape) else {}
        for var, cut in zip(params["call_jaxpr"].outvars, results, strict=True)
    ]
    jaxpr = params["call_jaxpr"]
    return MapShardings(
        *(
            tuple(
                placement.array_sharding(mesh, cut_spec(cut), atom.aval)
                for cut, atom in zip(cuts, atoms, strict=True)
            )
            for cuts, atoms in ((operands, jaxpr.invars), (results, jaxpr.outvars))
        )
    )


def partition_spec(mesh_axes: tuple[str, ...], axis: int | None) -> PartitionSpec:
    """The spec of an array whose dimension ``axis`` is cut along ``mesh_axes``."""
    return cut_spec({} if axis is None else {axis: mesh_axes})


_Cuts = dict[int, tuple[str, ...]]


def _map_cuts(
    params: dict[str, Any], mesh: AnyMesh, on: MeshPlacement
) -> tuple[list[_Cuts], list[_Cuts]]:
    """The cuts of a map's operands and results, maps inside included."""
    divides = params["axis_size"] % on.device_count(mesh) == 0

    def outside(axis: int | None, cuts: _Cuts) -> _Cuts:
        if axis is None:
            return cuts
        shifted = {dim + (dim >= axis): names for dim, names in cuts.items()}
        own = {axis: on.mesh_axes} if divides and on.mesh_axes else {}
        return own | shifted

    operands, results = _element_cuts(params["call_jaxpr"], mesh, on.inner_axes)
    return (
        list(map(outside, params["in_axes"], operands)),
        list(map(outside, params["out_axes"], results)),
    )


def _element_cuts(
    jaxpr: Jaxpr, mesh: AnyMesh, inner_axes: Sequence[str]
) -> tuple[list[_Cuts], list[_Cuts]]:
    """The cuts that maps and `PARTITIONED` make in inputs and outputs."""
    uses: dict[Any, list[_Cuts]] = {var: [] for var in jaxpr.invars}
    made: dict[Any, _Cuts] = {}
    for equation in jaxpr.eqns:
        cuts: Sequence[_Cuts] = [{}] * len(equation.invars)
        if equation.primitive is spmap_p:
            inner = inner_placement(equation, mesh, inner_axes)
            nowhere = MeshPlacement((), ())
            cuts, results = _map_cuts(equation.params, mesh, inner or nowhere)
            made.update(zip(equation.outvars, results, strict=True))
        elif equation.primitive in PARTITIONED:
            cuts = [PARTITIONED[equation.primitive].cuts(equation, mesh)]
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
