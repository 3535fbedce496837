"""What is said of random sharded programs agrees with their compiled text.

`make test` tries 15, `make test-deep` all 120.
"""

import dataclasses
import re

import pytest

from tests.explain import agreement, sharded_programs
from tests.explain.hlo_text import KINDS
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
    return [
        *agreement.disagreements(report, compiled),
        *(lie for each in report.collectives for lie in places(each, names)),
        *mesh_axes(report),
    ]


def places(each, names):
    """Where it is from: of the user's own the very function, of others one of them."""
    match = re.fullmatch(r"(.*):(\d+) \((.+)\)", each.source or "")
    if match is None or not match[1].endswith(FILE):
        return [f"no line of the program: {each}"]
    if each.added_by_partitioner:
        names = names | AROUND
    return [] if names & {*match[3].split(".")} else [f"not of {names}: {each}"]


def mesh_axes(report):
    """Those of the mesh have its devices, whatever made them but a map of its own."""
    return [
        f"{axis} has {SIZES[axis.name]} devices"
        for axis in report.axes
        if axis.name in SIZES and axis.kind != "spmap"
        if axis.devices != SIZES[axis.name]
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_says_what_the_compiled_program_does(seed):
    program = sharded_programs.program(seed)
    report = program.explain()
    assert disagreements(report, program.compiled(), program.names) == []


@pytest.mark.deep
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
    "another kind": lambda r: of_first(r, kind="broadcast"),
    "a missing line": lambda r: of_first(r, source=None),
    "a line of another function": lambda r: of_first(r, source=f"{FILE}:1 (other)"),
    "no axes": lambda r: of_first(r, axes=()),
    "another axis": lambda r: of_first(
        r, axes=tuple({*SIZES} - {*r.collectives[0].axes})
    ),
    "another operand": lambda r: of_first(r, before="f32[3]"),
    "no cause": lambda r: of_first(r, added_by_partitioner=True, cause=None),
    "no advice": lambda r: of_first(r, added_by_partitioner=True, advice=None),
    "one too few": lambda r: dataclasses.replace(r, collectives=r.collectives[1:]),
    "more devices": lambda r: dataclasses.replace(r, num_devices=16),
    "too few steps": lambda r: dataclasses.replace(
        r, axes=(dataclasses.replace(r.axes[0], size=100, vectorised=3),)
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
