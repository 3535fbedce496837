"""The collectives of a compiled program."""

import dataclasses
import math
import re
from collections.abc import Sequence

from shardmap.explain.read.asked import LayoutConstraint
from shardmap.explain.read.hlo.causes import Cause, cause_of
from shardmap.explain.read.hlo.groups import (
    axes_of_groups,
    axes_of_pairs,
    groups_of,
    pairs_of,
)
from shardmap.explain.read.hlo.names import merged_names
from shardmap.explain.read.hlo.operands import types
from shardmap.explain.read.hlo.text import Instruction, Module, nbytes

_KINDS = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
)


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One value that a compiled program sends between devices.

    Attributes:
      kind: as XLA calls it.
      axes: the mesh axes that it goes over; () if that cannot be told.
      group_size: how many devices are in a group.
      count: how often it runs; None: XLA does not know.
      bytes_in, bytes_out: of one device, each time.
      operations: what it may be of, such as ``psum``: the last parts of what XLA says
        about where it comes from. Several, where it does not say which value is whose.
      source: the line of the user's program that it is for.
      instruction: the number of the instruction; one may send several values.
      together: the bytes that a device puts into the whole instruction.
      values: how many it sends.
      cause: why the compiler put it in, if it did.
      before, after: what a device has of it, such as ``f32[4]``; "" if unknown.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int | None
    bytes_in: int
    bytes_out: int
    operations: tuple[str, ...]
    source: str | None
    instruction: int
    together: int
    values: int = 1
    cause: Cause | None = None
    before: str = ""
    after: str = ""


def compiled_collectives(
    module: Module,
    mesh: Sequence[tuple[str, int]] = (),
    asked: Sequence[LayoutConstraint] = (),
) -> list[CompiledCollective]:
    """The collectives of a program between different devices, in XLA's order.

    Args:
      module: the program.
      mesh: the names and sizes of the mesh axes, if they are known.
      asked: the layouts that the program asks for on its way.
    """
    found: list[CompiledCollective] = []
    for number, (instruction, count) in enumerate(module.runs()):
        kind = _KINDS.fullmatch(instruction.opcode)
        if kind is not None:
            found += _read(module, instruction, kind[1], count, number, mesh, asked)
    return found


def _read(
    module: Module,
    instruction: Instruction,
    kind: str,
    count: int | None,
    number: int,
    mesh: Sequence[tuple[str, int]],
    asked: Sequence[LayoutConstraint],
) -> list[CompiledCollective]:
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
    for place, operations in enumerate(_operations(instruction.op_name, len(outs))):
        one = (place, operations[0]) if names else None
        cause = cause_of(module, instruction, kind, one, asked)
        source = cause.source if cause is not None else None
        if source is None and names:
            source = module.source_of_value(instruction, names[place], place)
        found.append(
            CompiledCollective(
                kind,
                axes,
                group_size,
                count,
                ins[place],
                outs[place],
                operations,
                source or module.source_of(instruction),
                number,
                sum(ins),
                len(outs),
                cause,
                types(taken[place]) if len(taken) == len(given) else "",
                types(given[place]),
            )
        )
    return found


def _devices(
    module: Module, line: str, kind: str, mesh: Sequence[tuple[str, int]]
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


_Shapes = list[tuple[str, tuple[int, ...]]]


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
    """What each value of an instruction may be of.

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
