"""The collectives of a compiled program."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from shardmap.explaining.read.arrays import ShardedArgument
from shardmap.explaining.read.hlo.causes import cause_of
from shardmap.explaining.read.hlo.instructions import (
    SUMS,
    around,
    is_generated,
    merged_names,
    parts_of,
    reached,
    types,
)
from shardmap.explaining.read.hlo.loops import runs
from shardmap.explaining.read.hlo.module import Groups, Instruction, Module, Shape
from shardmap.explaining.read.hlo.sources import Sources
from shardmap.explaining.report import Collective
from shardmap.map.collectives.table import COLLECTIVES

Mesh = Sequence[tuple[str, int]]
"""The names and sizes of the axes."""
_KINDS = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"ragged-all-to-all|collective-broadcast)(-start)?"
)
_KERNEL = re.compile(r"tpu_custom_call|mosaic_gpu|__gpu\$xla")
_WRITTEN_AS = {
    "all-reduce": {"all-reduce", "reduce-scatter", "all-gather"},
}
"""Kinds of functions that XLA for TPU writes as another: small ones."""
_OF_PROGRAMS = {
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-broadcast": "pbroadcast",
}
"""The functions of kinds that XLA never adds."""


def compiled_collectives(
    module: Module,
    sources: Sources,
    mesh: Mesh = (),
    arguments: Mapping[str, ShardedArgument] = MappingProxyType({}),
) -> list[Collective]:
    """The collectives of a program between different devices, in XLA's order."""
    collectives: list[Collective] = []
    for instruction, count in runs(module.entry):
        if instruction.opcode == "send" and _is_between_slices(instruction):
            each = _between_slices(instruction, module.num_devices, mesh)
            collectives.append(dataclasses.replace(each, count=count))
        match = _KINDS.fullmatch(instruction.opcode)
        if match is None or _goes_on(instruction):
            continue
        kind = match[1]
        groups = _groups_of(instruction, kind, module.num_devices)
        group_size, axes = _devices(instruction, kind, groups, mesh)
        if group_size <= 1:
            continue
        given = taken = _given(instruction, kind)
        if kind != "all-to-all":
            taken = [each.shape for each in instruction.operands]
        named = instruction
        fusion = _scattering(instruction)
        if fusion is not None:
            kind, named = "reduce-scatter", fusion
            given = _scattered(instruction)
        # A scope of the user's may have a colon in its name, or several values have
        # one part of it: then it may be any of them.
        names = merged_names(named.op_name)
        is_named = len(names) == len(given)
        kinds = _WRITTEN_AS.get(kind, {kind})
        if is_generated(named):
            kinds = {kind}
        elif kind == "all-gather" and _is_added_up(named):
            kinds = {kind, "all-reduce"}
        for place, result in enumerate(given):
            name = names[place] if is_named else None
            any_of = [name] if name else names or [named.op_name]
            parts = [each.rsplit("/", 1)[-1] for each in any_of]
            if not named.op_name:
                parts = [*_unnamed(instruction, place)]
            operation = _OF_PROGRAMS.get(kind) or _function(parts, kinds)
            operand = instruction.operands[place if kind != "all-to-all" else 0]
            if fusion is not None:
                operand = fusion.operands[operand.parameter]
            cause = None
            if operation is None:
                cause = cause_of(sources, named, operand, kind, name, axes, arguments)
            source = None if cause is None else cause.source
            # Sums of several lines may have one name, and that of another sum, if XLA
            # put them together.
            is_sum = kind in SUMS and len(given) > 1
            if source is None and (name or is_sum):
                known = name or (operation and named.op_name)
                source = sources.of_value(operand, known)
            collectives.append(
                Collective(
                    kind=kind,
                    operation=operation,
                    axes=axes,
                    group_size=group_size,
                    count=count,
                    bytes_in=taken[place].bytes,
                    bytes_out=result.bytes,
                    source=source or sources.of(named),
                    added_by_partitioner=operation is None,
                    cause=None if cause is None else cause.text,
                    advice=None if cause is None else cause.advice,
                    together=len(given),
                    before=types(taken[place].arrays()),
                    after=types(result.arrays()),
                    groups=tuple(groups),
                )
            )
    return collectives


def _is_between_slices(instruction: Instruction) -> bool:
    handler = instruction.attributes.get("_xla_host_transfer_handler_name")
    return handler == "xla_megascale_runtime"


def _between_slices(sent: Instruction, num_devices: int, mesh: Mesh) -> Collective:
    """A collective between slices of TPUs, which XLA writes as a transfer of a host.

    The devices of a slice, ``num_devices``, are followed by those of the next.
    """
    noted, (shape, *_) = sent.attributes, sent.operands[0].shape.arrays()
    kind = noted.get("_xla_megascale_transfer_type", "").lower().replace("_", "-")
    slices = (
        noted.get("_xla_megascale_target", "{1,2}").partition("}")[0].count(",") + 1
    )
    starts = range(0, slices * num_devices, num_devices)
    groups = [tuple(start + k for start in starts) for k in range(num_devices)]
    name = noted.get("_xla_host_transfer_rendezvous", "").partition(".")[0]
    operation = _function([name.removesuffix("_invariant")], {kind})
    expected = "expected, as the part of a collective that is between slices"
    return Collective(
        kind=kind if _KINDS.fullmatch(kind) else "collective-permute",
        operation=operation,
        axes=_axes_of_pairs([(groups[0][0], each) for each in groups[0]], mesh),
        group_size=slices,
        count=None,
        bytes_in=shape.bytes,
        bytes_out=shape.bytes * (slices if kind == "all-gather" else 1),
        source=None,
        added_by_partitioner=operation is None,
        cause=None if operation else expected,
        before=str(shape),
        groups=tuple(groups),
    )


def _goes_on(instruction: Instruction) -> bool:
    """Whether it is a later part of a collective.

    XLA for TPU puts parts of one collective into the fusions that run meanwhile.
    """
    part = instruction.config.get("async_collective_fusion_config") or {}
    return part.get("flag_start", "-1") != "-1"


def _scattering(instruction: Instruction) -> Instruction | None:
    """The fusion of an all-reduce of which each device keeps a part, if it is one.

    XLA for TPU sends only that part of the sum.
    """
    fusion = around(instruction)
    how = fusion and fusion.config.get("collective_algorithm_config")
    is_one = how and "AllReduceScatter" in how.get("emitter", "")
    return fusion if is_one and instruction.opcode == "all-reduce" else None


def _scattered(instruction: Instruction) -> list[Shape]:
    """The part that each device keeps of each value of an all-reduce in a fusion."""
    root = instruction.computation.root
    kept: dict[int, Shape] = {}
    for part in root.operands if root.opcode == "tuple" else [root]:
        for each in reached(part, lambda each: each.operands):
            if each is instruction or instruction in each.operands:
                is_one = each.opcode == "get-tuple-element"
                kept[each.index if is_one else 0] = part.shape
                break
    return [kept[place] for place in sorted(kept)]


def _unnamed(instruction: Instruction, place: int) -> Collection[str]:
    """The operation of a value of a collective to which XLA gives no name.

    XLA for TPU writes a small reduce-scatter as an all-reduce, and a small all-gather
    as the sum of arrays that are zero but for one part.
    """
    operand = instruction.operands[place]
    if operand.opcode == "dynamic-update-slice":
        if operand.operands[0].opcode == "broadcast":
            return ("all_gather",)
    parts = [part for each in instruction.called for part in each.parameters]
    return {each.op_name.rsplit("/", 1)[-1] for each in parts}


def _is_added_up(instruction: Instruction) -> bool:
    """Whether a sum with the same name takes the result, as of 64 bits on TPUs."""
    takers = instruction.users
    return any(
        each.opcode == "reduce" and each.op_name == instruction.op_name != ""
        for each in (*takers, *[part for taker in takers for part in parts_of(taker)])
    )


def _function(parts: Sequence[str], kinds: Collection[str]) -> str | None:
    """The function of `jax.lax` that made a collective; None if XLA added it."""
    functions = [
        each.name
        for primitive, each in COLLECTIVES.items()
        if primitive.name in parts and each.kind in kinds
    ]
    return " or ".join(dict.fromkeys(functions)) or None


def _given(instruction: Instruction, kind: str) -> list[Shape]:
    """The results on a device. An all-to-all may have one operand for each device.

    The type of an instruction that starts something has its operands and perhaps flags,
    too: ``((operands), results, flags)``. An all-reduce has only results.
    """
    shape = instruction.shape
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        shape = shape.parts[1]
    return [shape] if kind == "all-to-all" else [*shape.arrays()]


def unseen(module: Module) -> list[str]:
    """Notes on what moves without being counted."""
    notes = []
    instructions = module.instructions
    if any(each.opcode.startswith("ragged-all-to-all") for each in instructions):
        notes.append(
            "A ragged all-to-all counts as if each device sent its whole operand: what "
            "it sends, only the running program knows."
        )
    if any(_KERNEL.match(each.target) for each in instructions):
        notes.append(
            "Kernels, such as those of Pallas, are not looked into: they may send to "
            "other devices, and their operations are not counted."
        )
    transfers = [each for each in instructions if each.is_host_transfer]
    if not all(map(_is_between_slices, transfers)):
        notes.append("What callbacks send to and from the host is not counted.")
    return notes


# The devices of a collective, and the mesh axes along which they differ.


def _groups_of(instruction: Instruction, kind: str, num_devices: int) -> Groups:
    """The groups of devices, or the pairs of different sender and receiver."""
    if kind == "collective-permute":
        return [(a, b) for a, b in instruction.pairs if a != b]
    return instruction.groups or [tuple(range(num_devices))]


def _devices(
    instruction: Instruction, kind: str, groups: Groups, mesh: Mesh
) -> tuple[int, tuple[str, ...]]:
    """The number of devices in a group, and its mesh axes."""
    sizes, axes = dict(mesh), instruction.group_axes
    if not axes or not {*axes} <= {*sizes}:
        # A group may have all devices along an axis, or some.
        pairs = [(group[0], other) for group in groups for other in group]
        axes = _axes_of_pairs(pairs, mesh)
    if kind != "collective-permute":
        return max(map(len, groups)), axes
    if not axes:
        return len({end for pair in groups for end in pair}), axes
    # As in the program, if a group has all devices along an axis.
    return math.prod(sizes[name] for name in axes), axes


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
