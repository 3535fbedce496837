"""The collectives of a program over an abstract mesh, read from its jaxpr.

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
from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import Aval, Equation, Jaxpr, aval_of, without_sharding
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.explain.read.hlo.text import types
from shardmap.explain.read.scope import Scope
from shardmap.explain.read.source import source_of
from shardmap.explain.report import Collective
from shardmap.map.collectives.names import for_mesh
from shardmap.map.collectives.split import uses_axis
from shardmap.map.collectives.table import COLLECTIVES
from shardmap.map.lowering.decision import Decision
from shardmap.map.lowering.lower_map import (
    block_function,
    on_one_device,
    one_block_of_whole,
)
from shardmap.map.primitives.map_primitive import spmap_p


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of axes and lines of operations, where maps are written out.

    Attributes:
      along: the mesh axes of a map's axis that has one element on each device.
      lines: the line of each operation, for those that a map changes.
    """

    along: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    lines: dict[str, str | None] = dataclasses.field(default_factory=dict)


def collectives_of(jaxpr: Jaxpr, source: str | None = None) -> list[Collective]:
    """The collectives of a program between different devices, in program order.

    Args:
      jaxpr: the program.
      source: the line of the function, for equations without a line.
    """
    found: list[Collective] = []
    _walk(jaxpr, Scope(line=source), _Names(), found)
    return found


def _walk(jaxpr: Jaxpr, around: Scope, names: _Names, found: list[Collective]) -> None:
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        if primitive in COLLECTIVES:
            found += _sent(equation, around, names)
            continue
        scope = around.at(equation)
        if primitive is spmap_p:
            _walk(*_written_out(equation, scope, names), found)
        elif primitive is SHARD_MAP:
            _walk(params["jaxpr"], scope.in_shard_map(equation), names, found)
        else:
            steps: int | None = 1
            if primitive is scan_p:
                steps = params["length"]
            elif primitive is while_p:
                steps = None
            for body in filter(_sends, jaxprs_in(params)):
                _walk(body, scope.in_loop(steps), names, found)


def _sends(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr holds anything that may go between devices."""
    return any(
        equation.primitive in (*COLLECTIVES, spmap_p, SHARD_MAP)
        for equation in equations(jaxpr)
    )


def group_size(equation: Equation, scope: Scope) -> int:
    """How many devices are in a group of a collective; 1 if it sends nothing."""
    if COLLECTIVES[equation.primitive].kind is None:
        return 1
    groups = equation.params.get("axis_index_groups")
    if groups is not None:
        return max(map(len, groups))
    return scope.devices(named_axes(equation))


def _sent(equation: Equation, scope: Scope, names: _Names) -> list[Collective]:
    size = group_size(equation, scope)
    collective = COLLECTIVES[equation.primitive]
    if size == 1 or collective.kind is None:
        return []
    axes = [a for name in named_axes(equation) for a in names.along.get(name, (name,))]
    before = [aval_of(atom) for atom in equation.invars]
    after = [aval_of(var) for var in equation.outvars]
    bytes_in = sum(map(nbytes, before))
    line = source_of(equation) or names.lines.get(collective.name) or scope.line
    return [
        Collective(
            kind=collective.kind,
            operation=collective.name,
            axes=tuple(map(str, axes)),
            group_size=size,
            count=scope.runs,
            bytes_in=bytes_in,
            bytes_out=sum(map(nbytes, after)),
            source=line,
            before=_types(before),
            after=_types(after),
            added_by_partitioner=False,
            together_bytes=bytes_in,
        )
    ]


def nbytes(aval: Aval) -> int:
    """The size of an array in bytes."""
    return math.prod(aval.shape) * aval.dtype.itemsize


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


def _written_out(
    equation: Equation, scope: Scope, names: _Names
) -> tuple[Jaxpr, Scope, _Names]:
    """The program of one device of a map, with its scope and names."""
    params = equation.params
    jaxpr, name = params["call_jaxpr"], params["axis_name"]
    decided, inner = scope.in_map(equation)
    if decided.mesh_axes:
        name, jaxpr = for_mesh(name, jaxpr, inner.mesh)
    lines = {
        COLLECTIVES[each.primitive].name: source_of(each)
        for each in uses_axis(jaxpr, name)
    }
    names = dataclasses.replace(names, lines=names.lines | lines)
    if decided.branch == "element" and not decided.gathers:
        inner = inner.with_sizes([(name, decided.axis.devices)])
        along = names.along | {name: decided.mesh_axes}
        return jaxpr, inner, dataclasses.replace(names, along=along)
    return _of_block(equation, jaxpr, decided, name, inner), inner, names


def _of_block(
    equation: Equation, jaxpr: Jaxpr, decided: Decision, name: Any, inner: Scope
) -> Jaxpr:
    """The program of a device that has a block of elements."""
    params = equation.params
    avals = [aval_of(atom) for atom in equation.invars]
    if not decided.mesh_axes:
        return _traced(on_one_device(**params), avals, inner)
    axis = dataclasses.replace(decided.axis, name=name)
    in_axes, out_axes = params["in_axes"], params["out_axes"]
    run = block_function(jaxpr, axis, in_axes, out_axes)
    length = axis.block
    if decided.gathers:
        run = one_block_of_whole(run, axis, in_axes, out_axes)
        length = axis.places
    avals = [
        aval if in_axis is None else aval.update(shape=_cut(aval, in_axis, length))
        for aval, in_axis in zip(avals, in_axes, strict=True)
    ]
    return _traced(run, avals, inner)


def _cut(aval: Aval, axis: int, length: int) -> tuple[int, ...]:
    return (*aval.shape[:axis], length, *aval.shape[axis + 1 :])


def _traced(run: Callable[..., Any], avals: Sequence[Any], scope: Scope) -> Jaxpr:
    with jax.sharding.use_abstract_mesh(NO_MESH):
        closed = jax.make_jaxpr(lambda *args: run(*args), axis_env=list(scope.sizes))(
            *map(without_sharding, avals)
        )
    return closed.jaxpr
