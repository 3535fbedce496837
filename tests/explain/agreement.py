"""Where a report differs from the text of its compiled program, in sentences."""

import collections
import math
import re

import jax

from tests.explain.hlo_text import WIDTHS, along, moved


def disagreements(report, compiled):
    """Of any program: kinds, numbers, devices, operands, causes, elements, layouts."""
    text = compiled.as_text()
    return [
        *numbers(report, text),
        *(lie for each in report.collectives for lie in groups(each, report, text)),
        *(lie for each in report.collectives for lie in operands(each)),
        *(lie for each in report.collectives for lie in causes(each)),
        *elements(report, text),
        *layouts(report, compiled),
    ]


def numbers(report, text):
    said = collections.Counter()
    for each in report.collectives:
        # The other reading counts what XLA does not know once as well.
        said[each.kind, each.bytes_in, each.bytes_out] += each.count or 1
    there = collections.Counter()
    for each, times in moved(text).items():
        there[each.kind, each.bytes_in, each.bytes_out] += times
    return [] if said == there else [f"said {said - there}, there {there - said}"]


def groups(each, report, text):
    """The axes are those along which the devices of some such collective differ."""
    sizes = dict(report.mesh)
    if not each.axes:
        return [f"no axes: {each}"]
    others = {axis.name for axis in report.axes} - {*sizes}  # Of other meshes.
    if not {*each.axes} <= {*sizes, *others}:
        return [f"axes that the mesh does not have: {each}"]
    if others & {*each.axes}:
        return []
    possible = along(sizes, each.axes)
    fitting = [
        value
        for value in moved(text)
        if value.kind == each.kind
        and (value.bytes_in, value.bytes_out) == (each.bytes_in, each.bytes_out)
        and all(any(group <= whole for whole in possible) for group in value.groups)
        and max(map(len, value.groups)) <= each.group_size
    ]
    if not fitting or math.prod(sizes[name] for name in each.axes) < each.group_size:
        return [f"no devices differ along these axes only: {each}"]
    return []


def operands(each):
    """What a device has before and after has the bytes that are said."""
    said = {each.before: each.bytes_in, each.after: each.bytes_out}
    return [
        f"{type_} has not {count:,} bytes: {each}"
        for type_, count in said.items()
        if type_ is None or nbytes(type_) != count
    ]


def nbytes(text):
    """Of such as ``f32[2,3] and 2 pieces of s32[4]``."""
    parts = re.findall(r"(?:(\d+) pieces of )?(\w+)\[([\d,]*)\]", text)
    return sum(
        int(pieces or 1)
        * WIDTHS[dtype]
        * math.prod(int(n) for n in sizes.split(",") if n)
        for pieces, dtype, sizes in parts
    )


def causes(each):
    """Of what the compiler put in, why; and what avoids it, unless it is expected."""
    faults = []
    if (each.cause is not None) != each.added_by_partitioner:
        faults.append(f"no cause: {each}")
    is_expected = (each.cause or "").startswith("expected")
    if (each.advice is not None) != (each.added_by_partitioner and not is_expected):
        faults.append(f"no advice: {each}")
    return faults


def elements(report, text):
    """Devices, batches and steps have room for the elements, and for no more rounds."""
    faults = []
    sizes = dict(report.mesh)
    for axis in report.axes:
        # The axis of a map is one of the mesh only where it is said so.
        if axis.kind in ("shard_map", "pmap", "sharding"):
            if sizes.get(axis.name) not in (None, axis.devices):
                faults.append(f"{axis} has {sizes[axis.name]} devices")
        if not axis.size or None in (axis.vectorised, axis.steps):
            continue
        each = -(-axis.size // axis.devices)
        if -(-each // axis.vectorised) != axis.steps:
            faults.append(f"{axis} does not multiply")
    devices = re.search(r"num_partitions=(\d+)", text)
    is_empty = "entry_computation_layout={()->()}" in text  # Of devices not a word.
    if not is_empty and report.num_devices != (int(devices[1]) if devices else 1):
        faults.append(f"{report.num_devices} devices")
    return faults


def layouts(report, compiled):
    faults = []
    for arrays, shardings in (
        (report.inputs, jax.tree.leaves(compiled.input_shardings)),
        (report.outputs, jax.tree.leaves(compiled.output_shardings)),
    ):
        if len(arrays) != len(shardings):  # What is not used has none.
            continue
        for array, sharding in zip(arrays, shardings, strict=True):
            if array.shard_shape != sharding.shard_shape(array.shape):
                faults.append(f"{array} lies as {sharding}")
    return faults
