"""Collectives and shardings of a program over an abstract mesh, from its jaxpr."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
from jax.extend.core.primitives import jit_p, scan_p, while_p
from jax.sharding import NamedSharding

from shardmap._jax.context import NO_MESH
from shardmap._jax.primitives import SHARD_MAP, manual_axes_of, named_axes
from shardmap._jax.types import Atom, Equation, Jaxpr, aval_of, without_sharding
from shardmap._jax.walk import as_open_jaxpr, equations, jaxprs_in
from shardmap.explaining.report import Collective
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.layout import map_shardings
from shardmap.map.lowering import lower_map
from shardmap.map.lowering.decision import EnclosingProgram, decide
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.primitives.params import MapParams
from shardmap.sharding.mesh import with_manual_axes
from shardmap.source import source_of

UNKNOWN = "as the compiler decides"


class _Around(NamedTuple):
    """The context of an equation.

    Attributes:
      line: the line of the program, for equations that a map makes.
      runs: how often it runs; None if only the running program knows.
      mesh: the mesh of the program of one device.
    """

    line: str | None
    runs: int | None = 1
    mesh: Any = NO_MESH


def collectives_of(jaxpr: Jaxpr, source: str | None) -> list[Collective]:
    """The collectives of a program between different devices, in program order.

    Args:
      jaxpr: the program.
      source: the line of the function, for equations without a line.
    """
    collectives: list[Collective] = []
    _walk(jaxpr, _Around(source), collectives)
    return collectives


def _walk(jaxpr: Jaxpr, around: _Around, collectives: list[Collective]) -> None:
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        here = around._replace(line=source_of(equation) or around.line)
        if primitive in COLLECTIVES:
            collectives += _sent(equation, here)
        elif primitive is spmap_p:
            _walk(_written_out(equation, here.mesh), here, collectives)
        elif primitive is SHARD_MAP:
            manual = {*manual_axes_of(equation), *here.mesh.manual_axes}
            mesh = with_manual_axes(params["mesh"].abstract_mesh, manual)
            _walk(params["jaxpr"], here._replace(mesh=mesh), collectives)
        else:
            runs = None if primitive is while_p else here.runs
            if primitive is scan_p and runs is not None:
                runs *= params["length"]
            bodies: Sequence[Jaxpr] = list(jaxprs_in(params))
            if platforms := params.get("branches_platforms"):
                # The mesh has no platform: what most of them do.
                bodies = [as_open_jaxpr(params["branches"][platforms.index(None)])]
            for body in filter(_sends, bodies):
                _walk(body, here._replace(runs=runs), collectives)


def _sends(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has an operation that may move data between devices."""
    primitives = {equation.primitive for equation in equations(jaxpr)}
    return not primitives.isdisjoint((*COLLECTIVES, spmap_p, SHARD_MAP))


def _written_out(equation: Equation, around: Any) -> Jaxpr:
    """The body of a map as lowered, with the collectives of the partitioner."""
    params = dataclasses.replace(MapParams.of(equation), lowering="manual")
    decided = decide(params, EnclosingProgram(around))
    mesh, run = lower_map.on_mesh(params, decided, around)
    sizes = [(name, around.shape[name]) for name in around.manual_axes]
    avals = [without_sharding(aval_of(atom)) for atom in equation.invars]
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda *args: run(*args), axis_env=sizes)(*avals)
    return traced.jaxpr


def _sent(equation: Equation, around: _Around) -> list[Collective]:
    collective = COLLECTIVES[equation.primitive]
    names, mesh = named_axes(equation), around.mesh
    axes = [name for name in mesh.manual_axes if name in names]
    groups = equation.params.get("axis_index_groups")
    size = math.prod(mesh.shape[name] for name in axes)
    size = size if groups is None else max(map(len, groups))
    if size == 1 or collective.kind is None:
        return []
    # The other operands of a ragged one are the room, offsets and sizes.
    is_ragged = collective.kind == "ragged-all-to-all"
    operands = equation.invars[:1] if is_ragged else equation.invars
    ins, outs = (
        sum(aval_of(atom).size * aval_of(atom).dtype.itemsize for atom in atoms)
        for atoms in (operands, equation.outvars)
    )
    return [
        Collective(
            kind=collective.kind,
            operation=collective.name,
            axes=tuple(axes),
            group_size=size,
            count=around.runs,
            bytes_in=ins,
            bytes_out=outs,
            source=around.line,
            added_by_partitioner=False,
        )
    ]


def shardings_of(jaxpr: Jaxpr) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shardings of inputs and outputs that the maps of a program fix.

    Args:
      jaxpr: the program.

    Returns:
      For inputs and for outputs, each a `NamedSharding` or `UNKNOWN`.
    """
    known: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        ins, outs = _shardings(equation)
        known.update(zip(equation.outvars, outs, strict=True))
        for atom, sharding in zip(equation.invars, ins, strict=True):
            if not isinstance(atom, jex_core.Literal) and sharding != UNKNOWN:
                known.setdefault(atom, sharding)

    def of(atom: Atom) -> Any:
        is_literal = isinstance(atom, jex_core.Literal)
        return UNKNOWN if is_literal else known.get(atom, UNKNOWN)

    return [*map(of, jaxpr.invars)], [*map(of, jaxpr.outvars)]


def _shardings(equation: Equation) -> tuple[Sequence[Any], Sequence[Any]]:
    params = equation.params
    if equation.primitive is spmap_p and params["mesh"] is not None:
        return map_shardings(MapParams.of(equation))
    if equation.primitive is SHARD_MAP:
        return (
            [NamedSharding(params["mesh"], spec) for spec in params["in_specs"]],
            [NamedSharding(params["mesh"], spec) for spec in params["out_specs"]],
        )
    if equation.primitive is jit_p:
        return shardings_of(*jaxprs_in(params))
    return [UNKNOWN] * len(equation.invars), [UNKNOWN] * len(equation.outvars)
