"""Which compiled collective is of which in the program: by hand, one case each."""

import pytest

from shardmap.explain.interconnect import Interconnect
from shardmap.explain.read.collectives import Sent
from shardmap.explain.read.hlo.causes import Cause
from shardmap.explain.read.hlo.collectives import CompiledCollective
from shardmap.explain.read.matching import reported

LINE = "train.py:3 (step)"


def sent(**changes):
    fields = {
        "kind": "all-reduce",
        "operation": "psum",
        "axes": ("i",),
        "group_size": 8,
        "count": 1,
        "bytes_in": 64,
        "bytes_out": 64,
        "source": LINE,
        "by_partitioner": False,
        "in_map": False,
    }
    return Sent(**{**fields, **changes})


def compiled(**changes):
    fields = {
        "kind": "all-reduce",
        "axes": ("i",),
        "group_size": 8,
        "count": 1,
        "bytes_in": 64,
        "bytes_out": 64,
        "operations": ("psum",),
        "source": LINE,
        "instruction": 0,
        "together": 64,
    }
    return CompiledCollective(**{**fields, **changes})


def test_what_agrees_is_one():
    (found,), notes = reported([sent()], [compiled()], None)
    assert found.in_compiled is True
    assert not found.added_by_partitioner
    assert notes == []


def test_what_only_the_program_has_was_removed():
    (found,), notes = reported([sent()], [], None)
    assert found.in_compiled is False
    assert "1 collective is in the program and not in the compiled one" in notes[0]


def test_without_a_compiled_program_nothing_is_known_of_it():
    (found,), notes = reported([sent()], None, None)
    assert found.in_compiled is None
    assert notes == []


def test_what_only_the_compiler_has_says_why():
    other = compiled(operations=("dot_general",), cause=Cause("for a sum", "cut it"))
    (found,), _ = reported([], [other], None)
    assert found.added_by_partitioner
    assert (found.operation, found.cause, found.advice) == (None, "for a sum", "cut it")


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "all-gather"},
        {"group_size": 4},
        {"operations": ("dot_general",)},
        {"source": "train.py:9 (other)"},
    ],
    ids=["kind", "devices", "operation", "line"],
)
def test_what_differs_is_not_the_same(changes):
    found, _ = reported([sent()], [compiled(**changes)], None)
    assert [each.in_compiled for each in found] == [False, True]


def test_of_two_the_one_with_its_count_is_taken():
    dead, live = sent(count=1), sent(count=4)
    found, _ = reported([dead, live], [compiled(count=4)], None)
    assert [(each.in_compiled, each.count) for each in found] == [(False, 1), (True, 4)]


def test_of_two_the_one_of_its_line_is_taken():
    one, other = sent(), sent(source="train.py:9 (other)")
    found, _ = reported(
        [one, other],
        [compiled(source=other.source), compiled(instruction=1)],
        None,
    )
    assert [each.source for each in found] == [LINE, other.source]
    assert all(each.in_compiled for each in found)


def test_copies_of_a_loop_that_was_unrolled_are_one():
    copies = [compiled(instruction=number) for number in range(3)]
    (found,), notes = reported([sent(count=3)], copies, None)
    assert found.count == 3
    assert notes == []


def test_other_bytes_are_those_of_the_compiler():
    (found,), notes = reported([sent()], [compiled(bytes_in=32, bytes_out=32)], None)
    assert (found.bytes_in, found.bytes_out) == (32, 32)
    assert "XLA sends 32 bytes for a psum of 64" in notes[0]


def test_another_count_is_that_of_the_compiler():
    (found,), notes = reported([sent(count=5)], [compiled(count=1)], None)
    assert found.count == 1
    assert "XLA does a psum 1 times, where the program says 5" in notes[0]


def test_values_that_are_sent_together_share_the_time_of_one():
    wires = Interconnect(1e9, 1e-6)
    values = [compiled(together=128), compiled(together=128)]
    found, notes = reported([sent(), sent()], values, wires)
    assert sum(each.seconds for each in found) == wires.time("all-reduce", 128, 8)
    assert "XLA sends 2 of the collectives as one." in notes


def test_an_unknown_count_has_no_time():
    wires = Interconnect(1e9, 1e-6)
    (found,), _ = reported([sent(count=None)], [compiled(count=None)], wires)
    assert (found.count, found.seconds, found.link_bytes) == (None, None, None)
