"""What a program sends between devices, read from its jaxpr.

A map is written out as the program of one device, by the functions that lower it; what
a device has of each array is then simply the shape in the jaxpr.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core.primitives import scan_p, while_p
from jax.sharding import AbstractMesh

from shardmap._jax.collectives import ALL_COLLECTIVES, named_axes
from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explain.read.axes import map_place
from shardmap.explain.read.source import source_of
from shardmap.map.collectives.rules import SplitAxis
from shardmap.map.collectives.split import lowers_per_device, uses_axis
from shardmap.map.lowering.blocks import block_function
from shardmap.map.lowering.register import on_one_device
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.tracing import shape_dtype_struct


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective as the program has it.

    Attributes:
      kind: as XLA calls it.
      operation: the function of `jax.lax`.
      axes: the named axes.
      group_size: how many devices are in a group.
      count: how often it runs; None: as often as the values ask for.
      bytes_in, bytes_out: of one device, each time.
      source: the line of the program.
      by_partitioner: whether the partitioner is free to do it otherwise.
    """

    kind: str
    operation: str
    axes: tuple[str, ...]
    group_size: int
    count: int | None
    bytes_in: int
    bytes_out: int
    source: str | None
    by_partitioner: bool


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What is around an equation.

    Attributes:
      sizes: the devices along each named axis.
      count: how often it runs.
      mesh: that of the outermost map.
      inner_axes: the mesh axes left for maps inside.
      by_partitioner: whether it is in a map that the partitioner cuts.
      sources: the line of each operation, for those that a map changes.
    """

    sizes: dict[Any, int] = dataclasses.field(default_factory=dict)
    count: int | None = 1
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    by_partitioner: bool = False
    sources: dict[str, str | None] = dataclasses.field(default_factory=dict)


def nbytes(aval: Any) -> int:
    """The size of an array in bytes."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def collectives_of(jaxpr: Any) -> list[Sent]:
    """The collectives of a program between different devices, in program order."""
    found: list[Sent] = []
    _walk(jaxpr, _Scope(), found)
    return found


def _walk(jaxpr: Any, scope: _Scope, found: list[Sent]) -> None:
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        if primitive in ALL_COLLECTIVES:
            sent = _sent(equation, scope)
            if sent is not None:
                found.append(sent)
        elif primitive is spmap_p:
            _walk(*_written_out(equation, scope), found)
        elif primitive is SHARD_MAP:
            mesh = params["mesh"]
            sizes = {name: mesh.shape[name] for name in params["newly_manual_axes"]}
            inner = dataclasses.replace(scope, sizes=scope.sizes | sizes)
            _walk(params["jaxpr"], inner, found)
        else:
            times: int | None = 1
            if primitive is scan_p:
                times = params["length"]
            elif primitive is while_p:
                times = None
            count = None if None in (scope.count, times) else scope.count * times  # type: ignore[operator]
            inner = dataclasses.replace(scope, count=count)
            for body in jaxprs_in(params):
                _walk(body, inner, found)


def _sent(equation: Any, scope: _Scope) -> Sent | None:
    collective = ALL_COLLECTIVES[equation.primitive]
    names = named_axes(equation)
    group_size = math.prod(scope.sizes.get(name, 1) for name in names)
    groups = equation.params.get("axis_index_groups")
    if groups is not None:
        group_size = len(groups[0])
    if group_size == 1 or collective.kind is None:
        return None
    return Sent(
        collective.kind,
        collective.name,
        tuple(map(str, names)),
        group_size,
        scope.count,
        sum(nbytes(atom.aval) for atom in equation.invars),
        sum(nbytes(var.aval) for var in equation.outvars),
        source_of(equation) or scope.sources.get(collective.name),
        scope.by_partitioner,
    )


def _written_out(equation: Any, scope: _Scope) -> tuple[Any, _Scope]:
    """The program of one device of a map, and what is around it."""
    params = equation.params
    mesh, walk = map_place(equation, scope.mesh, scope.inner_axes)
    by_partitioner = scope.by_partitioner or params["lowering"] == "spmd"
    inner = dataclasses.replace(
        scope,
        mesh=mesh,
        by_partitioner=by_partitioner,
        sources=scope.sources
        | {
            ALL_COLLECTIVES[each.primitive].name: source_of(each)
            for each in uses_axis(params["call_jaxpr"], params["axis_name"])
        },
    )
    avals = [atom.aval for atom in equation.invars]
    if walk is None:
        return _traced(on_one_device(**params), avals, inner.sizes), inner
    devices, block = walk.device_count(mesh), walk.block(mesh, params["axis_size"])
    name, mesh_axes = params["axis_name"], walk.mesh_axes
    sizes = scope.sizes | {axis: mesh.shape[axis] for axis in mesh_axes}
    inner = dataclasses.replace(inner, sizes=sizes, inner_axes=walk.inner_axes)
    if devices == 1:
        return _traced(on_one_device(**params), avals, inner.sizes), inner
    jaxpr = params["call_jaxpr"]
    platform = "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
    one_element = devices == params["axis_size"] and len(mesh_axes) == 1
    if one_element and lowers_per_device(jaxpr, name, platform):
        return jaxpr, dataclasses.replace(inner, sizes=sizes | {name: devices})
    axis = SplitAxis(name, params["axis_size"], mesh_axes, devices, block)
    run = block_function(
        jaxpr, axis, params["in_axes"], params["out_axes"], params["batch_size"]
    )
    blocks = [
        aval if in_axis is None else aval.update(shape=_cut(aval, in_axis, block))
        for aval, in_axis in zip(avals, params["in_axes"], strict=True)
    ]
    return _traced(run, blocks, sizes), inner


def _cut(aval: Any, axis: int, block: int) -> tuple[int, ...]:
    return (*aval.shape[:axis], block, *aval.shape[axis + 1 :])


def _traced(run: Any, avals: Sequence[Any], sizes: dict[Any, int]) -> Any:
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(lambda *args: run(*args), axis_env=list(sizes.items()))(
            *map(shape_dtype_struct, avals)
        )
    return closed.jaxpr


def has(jaxpr: Any, *primitives: Any) -> bool:
    """Whether a program, as one device runs it, has one of the primitives.

    The loop of a map with ``batch_size`` counts as a `jax.lax.scan`.
    """
    return any(
        equation.primitive in primitives
        or (
            equation.primitive is spmap_p
            and scan_p in primitives
            and equation.params["batch_size"] is not None
        )
        for equation in equations(jaxpr)
    )
