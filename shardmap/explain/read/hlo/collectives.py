"""The collectives of a compiled program."""

import math
import re
from collections.abc import Sequence

from shardmap.explain.read.constraints import LayoutConstraint
from shardmap.explain.read.hlo.causes import cause_of
from shardmap.explain.read.hlo.groups import (
    Mesh,
    axes_of_groups,
    axes_of_pairs,
    groups_of,
    pairs_of,
)
from shardmap.explain.read.hlo.sources import Sources
from shardmap.explain.read.hlo.text import (
    Instruction,
    Module,
    merged_names,
    nbytes,
    types,
)
from shardmap.explain.report import Collective
from shardmap.map.collectives.table import COLLECTIVES

_KINDS = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
)
_Shapes = list[tuple[str, tuple[int, ...]]]


def compiled_collectives(
    module: Module,
    sources: Sources,
    mesh: Mesh = (),
    asked: Sequence[LayoutConstraint] = (),
) -> list[Collective]:
    """The collectives of a program between different devices, in XLA's order.

    Args:
      module: the program.
      sources: the lines of its instructions.
      mesh: the names and sizes of the mesh axes, if they are known.
      asked: the layouts that the program asks for on its way.
    """
    found: list[Collective] = []
    for instruction, count in module.runs():
        kind = _KINDS.fullmatch(instruction.opcode)
        if kind is not None:
            found += _read(module, sources, instruction, kind[1], count, mesh, asked)
    return found


def _read(
    module: Module,
    sources: Sources,
    instruction: Instruction,
    kind: str,
    count: int | None,
    mesh: Mesh,
    asked: Sequence[LayoutConstraint],
) -> list[Collective]:
    group_size, axes = _devices(module, instruction.line, kind, mesh)
    if group_size <= 1:
        return []
    given = _given(instruction, kind)
    taken = _taken(module, instruction, kind)
    outs = [sum(nbytes(*shape) for shape in value) for value in given]
    ins = [_bytes_in(kind, size, group_size) for size in outs]
    names = merged_names(instruction.op_name)
    names = names if len(names) == len(outs) else []
    found = []
    for place, parts in enumerate(_operations(instruction.op_name, len(outs))):
        one = (place, parts[0]) if names else None
        operation = _function(parts, kind)
        cause = None
        if operation is None:
            cause = cause_of(module, sources, instruction, kind, one, asked)
        source = cause.source if cause is not None else None
        if source is None and names:
            source = sources.of_value(instruction, names[place], place)
        found.append(
            Collective(
                kind=kind,
                operation=operation,
                axes=axes,
                group_size=group_size,
                count=count,
                bytes_in=ins[place],
                bytes_out=outs[place],
                source=source or sources.of(instruction),
                added_by_partitioner=operation is None,
                cause=None if cause is None else cause.text,
                advice=None if cause is None else cause.advice,
                together=len(outs),
                before=types(taken[place]) if len(taken) == len(given) else None,
                after=types(given[place]),
            )
        )
    return found


def _function(parts: Sequence[str], kind: str) -> str | None:
    """The function of `jax.lax` that a collective is of; None for one of XLA's own.

    Args:
      parts: the operations that it may be of. XLA does not always say which.
      kind: of the collective.
    """
    functions = [
        each.name
        for primitive, each in COLLECTIVES.items()
        if primitive.name in parts and each.kind == kind
    ]
    return " or ".join(dict.fromkeys(functions)) or None


def _devices(
    module: Module, line: str, kind: str, mesh: Mesh
) -> tuple[int, tuple[str, ...]]:
    """How many devices are in a group, and along which mesh axes."""
    if kind != "collective-permute":
        groups = groups_of(line, module.num_devices)
        return max(map(len, groups)), axes_of_groups(groups, mesh)
    pairs = pairs_of(line)
    axes = axes_of_pairs(pairs, mesh)
    if not axes:
        return len({end for pair in pairs for end in pair}), axes
    # As in the program, where it is of all devices along an axis.
    return math.prod(size for name, size in mesh if name in axes), axes


def _given(instruction: Instruction, kind: str) -> list[_Shapes]:
    """What a device gets, for each value."""
    shapes = instruction.shapes
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        # Operands, as many results, and for a permutation two flags.
        shapes = [shape for shape in shapes if shape != ("u32", ())]
        shapes = shapes[len(shapes) // 2 :]
    return _values(shapes, kind)


def _taken(module: Module, instruction: Instruction, kind: str) -> list[_Shapes]:
    """What a device puts in, for each value."""
    operands = module.operands_of(instruction)
    return _values([shape for each in operands for shape in each.shapes], kind)


def _values(shapes: _Shapes, kind: str) -> list[_Shapes]:
    # One piece for each device.
    return [shapes] if kind == "all-to-all" else [[shape] for shape in shapes]


def _bytes_in(kind: str, given: int, group_size: int) -> int:
    if kind == "all-gather":
        return given // group_size
    return given * group_size if kind == "reduce-scatter" else given


def _operations(op_name: str, count: int) -> list[tuple[str, ...]]:
    """The operations that each value of an instruction may come from.

    >>> _operations("jit(f)/shard_map/psum", 1)
    [('psum',)]
    >>> _operations("jit(f)/(shard_map/psum:jvp(g)/pad)", 2)
    [('psum',), ('pad',)]
    >>> _operations("jit(f)/(a:b/psum:c:d/pmax)", 2)
    [('a', 'psum', 'c', 'pmax'), ('a', 'psum', 'c', 'pmax')]
    """
    names = merged_names(op_name) if count > 1 else []
    parts = [name.rsplit("/", 1)[-1] for name in names or [op_name]]
    if len(parts) == count:
        return [(part,) if part else () for part in parts]
    # A scope of the user's has a colon in its name, or several values have one part:
    # all that may be an operation.
    return [tuple(dict.fromkeys(parts))] * count
