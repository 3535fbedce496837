"""Times of collectives: formulas, names, and the user's own numbers."""

import hypothesis
import hypothesis.strategies as st
import pytest

from shardmap.explain.interconnect import (
    Interconnect,
    interconnect,
    sent_bytes,
)

KINDS = [
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
]
WIRES = Interconnect(bandwidth=1e9, latency=1e-6)
sizes = st.integers(1, 10**9)
groups = st.integers(2, 5000)


@hypothesis.given(st.sampled_from(KINDS), sizes, groups)
def test_twice_the_bandwidth_is_never_slower(kind, size, group):
    faster = Interconnect(bandwidth=2e9, latency=1e-6)
    assert faster.time(kind, size, group) <= WIRES.time(kind, size, group)


@hypothesis.given(sizes, groups)
def test_an_all_reduce_is_the_faster_of_ring_and_tree(size, group):
    rounds = 2 * (group - 1).bit_length()
    ring = 2 * (group - 1) * (1e-6 + size / group / 1e9)
    tree = rounds * (1e-6 + size / 1e9)
    assert WIRES.time("all-reduce", size, group) == pytest.approx(min(ring, tree))


@hypothesis.given(
    st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]),
    st.integers(2, 64),
    st.integers(1, 1000),
)
def test_what_a_device_sends_counted_message_by_message(kind, group, piece):
    size = piece * group
    rounds = 2 * (group - 1) if kind == "all-reduce" else group - 1
    message = size if kind == "all-gather" else piece
    assert sent_bytes(kind, size, group) == sum([message] * rounds)


def test_few_bytes_go_by_tree_and_many_by_ring():
    few, many = 8, 1 << 30
    ring_of_few = 2 * 4095 * 1e-6
    assert WIRES.time("all-reduce", few, 4096) < ring_of_few / 100
    sent = sent_bytes("all-reduce", many, 4096)
    assert WIRES.time("all-reduce", many, 4096) == pytest.approx(
        2 * 4095 * 1e-6 + sent / 1e9
    )


def test_every_interconnect_is_named_and_has_a_source():
    for name, each in Interconnect.KNOWN.items():
        assert interconnect(name) is each
        assert each.name == name
        assert each.source


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no interconnect is called 'wet string'"):
        interconnect("wet string")


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="must be a name or an Interconnect"):
        interconnect(25e9)


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        ("a", "b", "the bandwidth of an Interconnect must be a number, got 'a' of"),
        (1e9, None, "the latency of an Interconnect must be a number, got None of"),
    ],
)
def test_what_is_no_number_is_refused(bandwidth, latency, message):
    with pytest.raises(TypeError, match=message):
        Interconnect(bandwidth, latency)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 1e-6), (1e9, -1), (-1, 0)])
def test_impossible_numbers_are_refused(bandwidth, latency):
    with pytest.raises(ValueError, match="a bandwidth above 0 bytes per second"):
        Interconnect(bandwidth, latency)
