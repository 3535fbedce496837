"""The collectives of a compiled program."""

import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from shardmap.explaining.read.constraints import LayoutConstraint
from shardmap.explaining.read.hlo.causes import cause_of
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.read.hlo.text import (
    Instruction,
    Module,
    merged_names,
    nbytes,
    shapes_in,
    types,
)
from shardmap.explaining.report import Collective
from shardmap.map.collectives.table import COLLECTIVES

Mesh = Sequence[tuple[str, int]]
"""The names and sizes of the axes."""
_KINDS = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"ragged-all-to-all|collective-broadcast)(-start)?"
)
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu|__gpu\$xla)')
_CHAIN = re.compile(r'channel_id=(\d+),.*\bchain_id="(\d+)"')
_WRITTEN_AS = {
    "all-reduce": {"all-reduce", "reduce-scatter", "all-gather"},
    "collective-broadcast": {"collective-permute"},
}
"""Kinds of functions that XLA writes as another kind: for TPU, small ones."""
_OF_PROGRAMS = {
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-broadcast": "pbroadcast",
}
"""The functions of kinds that XLA never adds. For GPUs, it does not name them all."""
_Groups = list[tuple[int, ...]]
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
      mesh: the names and sizes of the mesh axes, if known.
      asked: the layouts of the program's constraints.
    """
    collectives: list[Collective] = []
    chains: dict[tuple[str, ...], str] = {}
    for instruction, count in module.runs():
        match = _KINDS.fullmatch(instruction.opcode)
        if match is None or _goes_on(instruction, chains):
            continue
        kind = match[1]
        group_size, axes = _devices(module, instruction.line, kind, mesh)
        if group_size <= 1:
            continue
        given = _given(instruction, kind)
        taken = _taken(module, instruction, kind)
        names = merged_names(instruction.op_name)
        names = names if len(names) == len(given) else []
        operations = _operations(instruction.op_name, len(given))
        if not instruction.op_name:
            operations = [_unnamed(module, instruction, k) for k in range(len(given))]
        for place, (parts, shapes) in enumerate(zip(operations, given, strict=True)):
            operation = _function(parts, _kinds(module, instruction, kind))
            if kind in _OF_PROGRAMS and not parts:
                operation = _OF_PROGRAMS[kind]
            cause = None
            if operation is None:
                one = (place, parts[0]) if names else None
                cause = cause_of(module, sources, instruction, kind, one, asked)
            source = None if cause is None else cause.source
            # Sums of several lines may have one name.
            if source is None and (names or (kind == "all-reduce" and len(given) > 1)):
                name = names[place] if names else instruction.op_name
                source = sources.of_value(instruction, name, place)
            size = sum(nbytes(*shape) for shape in shapes)
            taken_size = _bytes_in(kind, size, group_size)
            if kind == "ragged-all-to-all" and len(taken) == 1:
                taken_size = sum(nbytes(*shape) for shape in taken[0])
            collectives.append(
                Collective(
                    kind=kind,
                    operation=operation,
                    axes=axes,
                    group_size=group_size,
                    count=count,
                    bytes_in=taken_size,
                    bytes_out=size,
                    source=source or sources.of(instruction),
                    added_by_partitioner=operation is None,
                    cause=None if cause is None else cause.text,
                    advice=None if cause is None else cause.advice,
                    together=len(given),
                    before=types(taken[place]) if len(taken) == len(given) else None,
                    after=types(shapes),
                )
            )
    return collectives


def _goes_on(instruction: Instruction, chains: dict[tuple[str, ...], str]) -> bool:
    """Whether it is a later part of a collective.

    XLA for TPU puts parts of one collective into the fusions that run meanwhile, as
    equal instructions of one chain.

    Args:
      instruction: the collective.
      chains: the name of the first instruction of each chain, which is added to.
    """
    chain = _CHAIN.search(instruction.line)
    if chain is None:
        return False
    return chains.setdefault(chain.groups(), instruction.name) != instruction.name


def _unnamed(module: Module, instruction: Instruction, place: int) -> tuple[str, ...]:
    """The operation of a value of a collective to which XLA gives no name.

    XLA for TPU writes a small reduce-scatter as an all-reduce, and a small all-gather
    as the sum of arrays that are zero but for one part.
    """
    operand = next(iter(module.operands_of(instruction)[place : place + 1]), None)
    if operand is not None and operand.opcode == "dynamic-update-slice":
        if module.operands_of(operand)[0].opcode == "broadcast":
            return ("all_gather",)
    called = dict(instruction.called).get("to_apply", "")
    parts = module.computations.get(called, [])
    names = {each.op_name for each in parts if each.opcode == "parameter"}
    return tuple(names - {""})


def _kinds(module: Module, instruction: Instruction, kind: str) -> set[str]:
    """The kinds of functions that a collective may be of."""
    if instruction.is_generated:
        return {kind}
    name = instruction.op_name
    # XLA for TPU gathers values of 64 bits, and adds them up on each device.
    if kind == "all-gather" and name and _is_added_up(module, instruction):
        return {kind, "all-reduce"}
    return _WRITTEN_AS.get(kind, {kind})


def _is_added_up(module: Module, instruction: Instruction) -> bool:
    """Whether a reduction with the same name takes the result."""
    takers = module.users_of(instruction)
    inside = [part for each in takers for part in module.parts_of(each)]
    return any(
        each.opcode == "reduce" and each.op_name == instruction.op_name
        for each in (*takers, *inside)
    )


def _function(parts: Sequence[str], kinds: Collection[str]) -> str | None:
    """The function of `jax.lax` that made a collective; None if XLA added it.

    Args:
      parts: its possible operations. XLA does not always say which.
      kinds: the kinds of collective that it may be.
    """
    functions = [
        each.name
        for primitive, each in COLLECTIVES.items()
        if primitive.name in parts and each.kind in kinds
    ]
    return " or ".join(dict.fromkeys(functions)) or None


def _devices(
    module: Module, line: str, kind: str, mesh: Mesh
) -> tuple[int, tuple[str, ...]]:
    """The number of devices in a group, and its mesh axes."""
    if kind != "collective-permute":
        groups = _groups_of(line, module.num_devices)
        # A group may have all devices along an axis, or some.
        pairs = [(group[0], other) for group in groups for other in group]
        return max(map(len, groups)), _axes_of_pairs(pairs, mesh)
    pairs = _pairs_of(line)
    axes = _axes_of_pairs(pairs, mesh)
    if not axes:
        return len({end for pair in pairs for end in pair}), axes
    # As in the program, if a group has all devices along an axis.
    return math.prod(size for name, size in mesh if name in axes), axes


def _given(instruction: Instruction, kind: str) -> list[_Shapes]:
    """The results on a device, for each value."""
    return _values(shapes_in(instruction.result_type), kind)


def _taken(module: Module, instruction: Instruction, kind: str) -> list[_Shapes]:
    """The operands on a device, for each value."""
    operands = module.operands_of(instruction)
    if kind == "ragged-all-to-all":  # The others are the room, offsets and sizes.
        operands = operands[:1]
    return _values([shape for each in operands for shape in each.shapes], kind)


def _values(shapes: _Shapes, kind: str) -> list[_Shapes]:
    # One operand for each device.
    return [shapes] if kind == "all-to-all" else [[shape] for shape in shapes]


def _bytes_in(kind: str, given: int, group_size: int) -> int:
    if kind == "all-gather":
        return given // group_size
    return given * group_size if kind == "reduce-scatter" else given


def _operations(op_name: str, count: int) -> list[tuple[str, ...]]:
    """The possible operations of each value of an instruction.

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


def unseen(module: Module) -> list[str]:
    """Notes on what moves without being counted."""
    notes = []
    instructions = module.by_name.values()
    if any(each.opcode.startswith("ragged-all-to-all") for each in instructions):
        notes.append(
            "A ragged all-to-all counts as if each device sent its whole operand: what "
            "it sends, only the running program knows."
        )
    if any(_KERNEL.search(each.line) for each in instructions):
        notes.append(
            "Kernels, such as those of Pallas, are not looked into: they may send to "
            "other devices, and their operations are not counted."
        )
    if any("is_host_transfer=true" in each.line for each in instructions):
        notes.append("What callbacks send to and from the host is not counted.")
    return notes


# The devices of a collective, and the mesh axes along which they differ.


def _groups_of(line: str, num_devices: int) -> _Groups:
    """The groups of devices of a collective.

    >>> _groups_of("replica_groups={{0,1},{2,3}}", 4)
    [(0, 1), (2, 3)]
    >>> _groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    [(0, 2), (1, 3)]
    >>> _groups_of("replica_groups=mesh['i'=2,'j'=2] {'i'}", 4)
    [(0, 2), (1, 3)]
    >>> _groups_of("replica_groups={}", 4)
    [(0, 1, 2, 3)]
    """
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed is not None:
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
    iota = re.search(r"replica_groups=\[(\d+,\d+)\](<=\S*?)?(?:, |\s|$)", line)
    if iota is not None:
        shape = _numbers(iota[1])
        ids = _iota(iota[2] or "", shape[0] * shape[1])
        return [tuple(row) for row in ids.reshape(shape).tolist()]
    named = re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", line)
    if named is not None:
        return _along_names(named[1], named[2], named[3])
    return [tuple(range(num_devices))]


def _pairs_of(line: str) -> list[tuple[int, int]]:
    """The pairs of different sender and receiver of a permutation."""
    listed = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed[1]) if listed else []
    return [(int(a), int(b)) for a, b in pairs if a != b]


def _axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the devices of a pair differ.

    >>> _axes_of_pairs([(0, 1), (1, 0)], [("i", 2), ("j", 2)])
    ('j',)
    """
    shape = [size for _, size in mesh]
    if not pairs or max(map(max, pairs)) >= np.prod(shape, dtype=int):
        return ()
    sources, targets = (
        np.array(np.unravel_index(ends, shape)) for ends in zip(*pairs, strict=True)
    )
    differ = (sources != targets).any(axis=1)
    return tuple(name for (name, _), other in zip(mesh, differ, strict=True) if other)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text))


def _iota(text: str, count: int) -> np.ndarray:
    """Numbers from 0, reshaped and transposed as by ``<=[2,4]T(1,0)``."""
    match = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return np.arange(count)
    ids = np.arange(count).reshape(_numbers(match[1]))
    return ids.transpose(_numbers(match[2])) if match[2] else ids


def _along_names(sizes: str, order: str, names: str) -> _Groups:
    """The groups along named axes of XLA's mesh, or along parts of them."""
    mesh = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)]
    ids = _iota(order, int(np.prod([size for _, size in mesh], dtype=int))).ravel()
    # A part ``'i':(2)4`` of an axis has 2 before it, and 4 itself.
    parts = {
        name: (int(before or 1), int(size or dict(mesh)[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names)
    }
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in mesh:
        before, length = parts.get(name, (size, 1))
        if name in parts:
            grouped.append(len(shape) + 1)
        shape += [before, length, size // before // length]
    ids = ids.reshape(shape)
    rest = [d for d in range(ids.ndim) if d not in grouped]
    ids = ids.transpose([*rest, *grouped])
    group = int(np.prod(ids.shape[len(rest) :], dtype=int))
    return [tuple(row) for row in ids.reshape(-1, group).tolist()]
