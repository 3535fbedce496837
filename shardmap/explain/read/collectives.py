"""What a program sends between devices, read from its jaxpr.

A map is written out as the program of one device, by the functions that lower it; what
a device has of each array is then simply the shape in the jaxpr.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import scan_p, while_p

from shardmap._jax.collectives import named_axes
from shardmap._jax.context import NO_MESH
from shardmap._jax.primitives import SHARD_MAP, walked_axes
from shardmap._jax.types import (
    Aval,
    Equation,
    Jaxpr,
    aval_of,
    without_sharding,
)
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explain.counts import times
from shardmap.explain.read.hlo.operands import types
from shardmap.explain.read.meshes import map_place
from shardmap.explain.read.sent import Sent
from shardmap.explain.read.source import source_of
from shardmap.map.collectives.names import for_mesh
from shardmap.map.collectives.split import uses_axis
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.lowering import decision
from shardmap.map.lowering.blocks import block_function, on_one_device
from shardmap.map.lowering.decision import ALONE, Around
from shardmap.map.lowering.manual import one_block_of_whole
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.map.tracing import per_jaxpr


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What is around an equation.

    Attributes:
      sizes: the devices along each named axis.
      count: how often it runs.
      mesh: that of the outermost map.
      inner_axes: the mesh axes left for maps inside.
      program: what it is a part of.
      along: the mesh axes of a map's axis that has one element on each device.
      sources: the line of each operation, for those that a map changes.
      line: that of what is around; JAX has no lines of the user's for some of what it
        keeps, such as the rule of a `jax.custom_vjp` under `jax.checkpoint`.
      partitioned: whether to give those that are left to the partitioner.
    """

    sizes: dict[Any, int] = dataclasses.field(default_factory=dict)
    count: int | None = 1
    mesh: Any = None
    inner_axes: tuple[str, ...] = ()
    program: Around = ALONE
    along: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    sources: dict[str, str | None] = dataclasses.field(default_factory=dict)
    line: str | None = None
    partitioned: bool = True


def nbytes(aval: Aval) -> int:
    """The size of an array in bytes."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def collectives_of(
    jaxpr: Jaxpr, source: str | None = None, partitioned: bool = True
) -> list[Sent]:
    """The collectives of a program between different devices, in program order.

    Args:
      jaxpr: the program.
      source: where the function is, for those of which JAX has no line.
      partitioned: whether to give those that are left to the partitioner.
    """
    found: list[Sent] = []
    _walk(jaxpr, _Scope(line=source, partitioned=partitioned), found)
    return found


def _walk(jaxpr: Jaxpr, around: _Scope, found: list[Sent]) -> None:
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        if primitive in COLLECTIVES:
            sent = _sent(equation, around)
            if sent is not None:
                found.append(sent)
            continue
        line = source_of(equation) or around.line
        scope = dataclasses.replace(around, line=line)
        if primitive is spmap_p:
            _walk(*_written_out(equation, scope), found)
        elif primitive is SHARD_MAP:
            mesh = params["mesh"]
            manual = walked_axes(equation)
            sizes = {name: mesh.shape[name] for name in manual}
            inner = dataclasses.replace(
                scope,
                sizes=scope.sizes | sizes,
                program=Around(mesh.axis_names, scope.program.manual | manual),
            )
            _walk(params["jaxpr"], inner, found)
        else:
            steps: int | None = 1
            if primitive is scan_p:
                steps = params["length"]
            elif primitive is while_p:
                steps = None
            inner = dataclasses.replace(scope, count=times(scope.count, steps))
            for body in filter(_sends, jaxprs_in(params)):
                _walk(body, inner, found)


@per_jaxpr
def _sends(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr holds anything that may go between devices."""
    return any(
        equation.primitive in COLLECTIVES
        or equation.primitive in (spmap_p, SHARD_MAP)
        or any(map(_sends, jaxprs_in(equation.params)))
        for equation in jaxpr.eqns
    )


def _sent(equation: Equation, scope: _Scope) -> Sent | None:
    collective = COLLECTIVES[equation.primitive]
    names = named_axes(equation)
    group_size = math.prod(scope.sizes.get(name, 1) for name in names)
    groups = equation.params.get("axis_index_groups")
    if groups is not None:
        group_size = max(map(len, groups))
    if scope.program.partitioned and not scope.partitioned:
        return None
    if group_size == 1 or collective.kind is None:
        return None
    before = [aval_of(atom) for atom in equation.invars]
    after = [aval_of(var) for var in equation.outvars]
    bytes_in = sum(map(nbytes, before))
    return Sent(
        kind=collective.kind,
        operation=collective.name,
        axes=tuple(
            str(axis) for name in names for axis in scope.along.get(name, (name,))
        ),
        group_size=group_size,
        count=scope.count,
        bytes_in=bytes_in,
        bytes_out=sum(map(nbytes, after)),
        source=source_of(equation) or scope.sources.get(collective.name) or scope.line,
        before=_types(before),
        after=_types(after),
        together=bytes_in,
    )


def _types(avals: Sequence[Aval]) -> str:
    """Such as ``f32[4,2] and s32[]``."""
    return types((_of_xla(aval.dtype.name), aval.shape) for aval in avals)


def _of_xla(dtype: str) -> str:
    """XLA's name of a dtype.

    >>> _of_xla("float32"), _of_xla("int8"), _of_xla("bfloat16"), _of_xla("bool")
    ('f32', 's8', 'bf16', 'pred')
    """
    for name, short in _XLA.items():
        dtype = re.sub(rf"^{name}(?=\d|$)", short, dtype)
    return dtype


_XLA = {
    "float": "f", "bfloat": "bf", "int": "s", "uint": "u", "complex": "c",
    "bool": "pred",
}  # fmt: skip


def _written_out(equation: Equation, scope: _Scope) -> tuple[Any, _Scope]:
    """The program of one device of a map, and what is around it."""
    params = equation.params
    jaxpr, name = params["call_jaxpr"], params["axis_name"]
    mesh, walk = map_place(equation, scope.mesh, scope.inner_axes)
    decided = decision.decide(params, mesh, walk, scope.program)
    if decided.mesh_axes:
        name, jaxpr = for_mesh(name, jaxpr, mesh)
    spread = decided.spread
    sizes = scope.sizes | {axis: mesh.shape[axis] for axis in decided.mesh_axes}
    inner = dataclasses.replace(
        scope,
        sizes=sizes,
        mesh=mesh,
        inner_axes=scope.inner_axes if walk is None else walk.inner_axes,
        program=decided.inside(mesh, scope.program),
        sources=scope.sources
        | {
            COLLECTIVES[each.primitive].name: source_of(each)
            for each in uses_axis(jaxpr, name)
        },
    )
    avals = [aval_of(atom) for atom in equation.invars]
    if not decided.mesh_axes:
        return _traced(on_one_device(**params), avals, sizes), inner
    if decided.branch == "element" and not decided.gathers:
        sizes = sizes | {name: spread.devices}
        along = scope.along | {name: decided.mesh_axes}
        return jaxpr, dataclasses.replace(inner, sizes=sizes, along=along)
    axis, in_axes, out_axes = decided.split(name), params["in_axes"], params["out_axes"]
    run = block_function(jaxpr, axis, in_axes, out_axes, spread.vectorised)
    length = spread.block
    if decided.gathers:
        run = one_block_of_whole(run, axis, in_axes, out_axes)
        length = spread.places
    avals = [
        aval if in_axis is None else aval.update(shape=_cut(aval, in_axis, length))
        for aval, in_axis in zip(avals, in_axes, strict=True)
    ]
    return _traced(run, avals, sizes), inner


def _cut(aval: Aval, axis: int, length: int) -> tuple[int, ...]:
    return (*aval.shape[:axis], length, *aval.shape[axis + 1 :])


def _traced(
    run: Callable[..., Any], avals: Sequence[Any], sizes: dict[Any, int]
) -> Any:
    with jax.sharding.use_abstract_mesh(NO_MESH):
        closed = jax.make_jaxpr(lambda *args: run(*args), axis_env=list(sizes.items()))(
            *map(without_sharding, avals)
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
