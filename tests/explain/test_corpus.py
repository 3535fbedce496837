"""What is said of random sharded programs agrees with their compiled text.

`make test` tries 15, `make test-deep` all 120.
"""

import collections
import dataclasses
import math
import re

import jax
import pytest

from tests.explain import sharded_programs
from tests.explain.hlo_text import KINDS, WIDTHS, along, moved
from tests.explain.sharded_programs import SIZES

QUICK, ALL = 15, 120
FILE = "tests/explain/sharded_programs.py"
AROUND = {"fun", "total", "whole", "Program"}
"""The functions around the operations: that of a call is where a map pads."""
SEEDS = [
    pytest.param(seed, marks=() if seed < QUICK else pytest.mark.deep)
    for seed in range(ALL)
]


def disagreements(report, compiled, names):
    """Where a report differs from the compiled program, in sentences.

    Args:
      names: of the functions that may send.
    """
    text = compiled.as_text()
    return [
        *numbers(report, text),
        *(lie for each in report.collectives for lie in places(each, names)),
        *(lie for each in report.collectives for lie in groups(each, report, text)),
        *(lie for each in report.collectives for lie in operands(each)),
        *(lie for each in report.collectives for lie in causes(each)),
        *elements(report, text),
        *layouts(report, compiled),
    ]


def numbers(report, text):
    said = collections.Counter()
    for each in report.collectives:
        if each.in_compiled:
            said[each.kind, each.bytes_in, each.bytes_out] += each.count
    there = collections.Counter()
    for each, times in moved(text).items():
        there[each.kind, each.bytes_in, each.bytes_out] += times
    return [] if said == there else [f"said {said - there}, there {there - said}"]


def places(each, names):
    """Where it is from: of the user's own the very function, of others one of them."""
    found = re.fullmatch(r"(.*):(\d+) \((.+)\)", each.source or "")
    if found is None or not found[1].endswith(FILE):
        return [f"no line of the program: {each}"]
    if each.added_by_partitioner:
        names = names | AROUND
    return [] if names & {*found[3].split(".")} else [f"not of {names}: {each}"]


def groups(each, report, text):
    """The axes are those along which the devices of some such collective differ."""
    sizes = dict(report.mesh)
    if not {*each.axes} <= {*sizes} or not each.axes:
        return [f"axes that the mesh does not have: {each}"]
    if not each.in_compiled:
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
    """Why it is there, and what avoids it, is said of all that the compiler put in."""
    said = each.cause is not None and each.advice is not None
    return [f"no cause: {each}"] if said != each.added_by_partitioner else []


def elements(report, text):
    """Devices, batches and steps have room for the elements, and for no more rounds."""
    found = []
    for axis in report.axes:
        if None in (axis.size, axis.vectorised, axis.steps):
            continue
        each = -(-axis.size // axis.devices)
        if -(-each // axis.vectorised) != axis.steps:
            found.append(f"{axis} does not multiply")
        if axis.name in SIZES and axis.kind != "spmap":
            if axis.devices != SIZES[axis.name]:
                found.append(f"{axis} has {SIZES[axis.name]} devices")
    # Thirteen elements are two for each of seven.
    if f"num_partitions={report.num_devices}" not in text:
        found.append(f"{report.num_devices} devices")
    return found


def layouts(report, compiled):
    found = []
    for arrays, shardings in (
        (report.inputs, jax.tree.leaves(compiled.input_shardings)),
        (report.outputs, jax.tree.leaves(compiled.output_shardings)),
    ):
        if len(arrays) != len(shardings):  # What is not used has none.
            continue
        for array, sharding in zip(arrays, shardings, strict=True):
            if array.shard_shape != sharding.shard_shape(array.shape):
                found.append(f"{array} lies as {sharding}")
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_says_what_the_compiled_program_does(seed):
    program = sharded_programs.program(seed)
    report = program.explain()
    assert disagreements(report, program.compiled(), program.names) == []


def test_all_kinds_of_collectives_are_tried_of_both_origins():
    """Those of the quick programs; the others only add to them."""
    kinds = {
        (kind.kind, made)
        for seed in range(QUICK)
        for made, kind in origins(sharded_programs.program(seed).explain())
    }
    for kind in KINDS.split("|"):
        assert (kind, "user") in kinds
    assert ("all-gather", "compiler") in kinds


def origins(report):
    for each in report.collectives:
        yield "compiler" if each.added_by_partitioner else "user", each


@pytest.fixture(scope="module")
def truth():
    program = sharded_programs.program(3)
    return program.explain(), program.compiled(), program.names


def of_first(report, **changes):
    first, *rest = report.collectives
    changed = dataclasses.replace(first, **changes)
    return dataclasses.replace(report, collectives=(changed, *rest))


LIES = {
    "a wrong count": lambda r: of_first(r, count=r.collectives[0].count + 1),
    "wrong bytes in": lambda r: of_first(r, bytes_in=r.collectives[0].bytes_in + 4),
    "wrong bytes out": lambda r: of_first(r, bytes_out=1),
    "another kind": lambda r: of_first(r, kind="broadcast"),
    "a missing line": lambda r: of_first(r, source=None),
    "a line of another function": lambda r: of_first(r, source=f"{FILE}:1 (other)"),
    "a line of another file": lambda r: of_first(r, source="other.py:1 (transpose)"),
    "no axes": lambda r: of_first(r, axes=()),
    "an axis that is not there": lambda r: of_first(r, axes=("other",)),
    "another axis": lambda r: of_first(
        r, axes=tuple({*SIZES} - {*r.collectives[0].axes})
    ),
    "another operand": lambda r: of_first(r, before="f32[3]"),
    "an unknown result": lambda r: of_first(r, after=None),
    "no cause": lambda r: of_first(r, added_by_partitioner=True, cause=None),
    "no advice": lambda r: of_first(r, added_by_partitioner=True, advice=None),
    "one too few": lambda r: dataclasses.replace(r, collectives=r.collectives[1:]),
    "one too many": lambda r: dataclasses.replace(r, collectives=r.collectives * 2),
    "more devices": lambda r: dataclasses.replace(r, num_devices=16),
    "too few steps": lambda r: dataclasses.replace(
        r, axes=(dataclasses.replace(r.axes[0], size=100, vectorised=3),)
    ),
    "more devices along an axis": lambda r: dataclasses.replace(
        r, axes=(dataclasses.replace(r.axes[0], name="data", size=8, devices=8),)
    ),
    "another layout": lambda r: dataclasses.replace(
        r, arrays=tuple(dataclasses.replace(a, shard_shape=(1,)) for a in r.arrays)
    ),
}


def test_nothing_is_said_of_the_truth(truth):
    assert disagreements(*truth) == []


@pytest.mark.parametrize("lie", LIES)
def test_a_planted_lie_is_seen(truth, lie):
    report, compiled, names = truth
    assert len(disagreements(LIES[lie](report), compiled, names)) > 0
