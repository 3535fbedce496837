"""Times of collectives: formulas, names, and the user's own numbers."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explaining.interconnect import CHIPS, interconnect_on

WIRES = sm.Interconnect(bandwidth=1000.0, latency=0.5, name="string")
KINDS = [
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
]


def gather(x):
    return lax.all_gather(x, "i")


@hypothesis.given(st.sampled_from(KINDS), st.integers(1, 10**9), st.integers(2, 5000))
def test_twice_the_bandwidth_is_never_slower(kind, size, group):
    faster = sm.Interconnect(bandwidth=2000.0, latency=0.5)
    assert faster.time(kind, size, group) <= WIRES.time(kind, size, group)


@hypothesis.given(st.integers(1, 10**9), st.integers(2, 5000))
def test_an_all_reduce_is_the_faster_of_ring_and_tree(size, group):
    rounds = 2 * (group - 1).bit_length()
    ring = 2 * (group - 1) * (0.5 + size / group / 1000)
    tree = rounds * (0.5 + size / 1000)
    assert WIRES.time("all-reduce", size, group) == pytest.approx(min(ring, tree))


def test_every_interconnect_is_named_and_has_a_source():
    mapped, x = sm.spmap(gather, "i"), np.ones(8, np.float32)
    for name, each in sm.Interconnect.KNOWN.items():
        report = sm.explain(mapped, interconnect=name)(x)
        assert report.interconnect is each
        assert each.name == name
        assert each.source


def test_times_for_an_interconnect_of_ones_own():
    report = sm.explain(sm.spmap(gather, "i"), interconnect=WIRES)(
        np.ones((8, 25), np.float32)
    )
    (sent,) = report.collectives
    # Seven messages of 100 bytes.
    assert sent.link_bytes == 700
    assert sent.seconds == pytest.approx(7 * 0.5 + 700 / 1000)
    assert report.seconds == report.to_dict()["seconds"] == sent.seconds
    assert report.to_dict()["interconnect"]["name"] == "string"
    assert "Together about 4.2 s, estimated for string" in str(report)
    assert sm.explain(sm.spmap(gather, "i"))(np.ones(8, np.float32)).seconds is None


def test_collectives_that_are_sent_as_one_share_the_latency():
    mapped = sm.spmap(lambda x: [lax.psum(x * k, "i") for k in (1, 2)], "i")
    report = sm.explain(mapped, interconnect=WIRES)(np.ones((8, 25), np.float32))
    assert [each.together for each in report.collectives] == [2, 2]
    assert report.seconds == pytest.approx(WIRES.time("all-reduce", 200, 8))


def test_a_loop_without_a_fixed_end_has_no_time():
    def fun(x):
        return lax.while_loop(lambda x: lax.pmax(x.sum(), "i") > 1, lambda x: x / 2, x)

    x = jax.ShapeDtypeStruct((8, 3), np.float32)
    report = sm.explain(sm.spmap(fun, "i"), interconnect="pcie5")(x)
    assert [each.seconds for each in report.collectives] == [None]


def machine(kind, hosts=1, platform="tpu"):
    return [
        SimpleNamespace(device_kind=kind, process_index=k, platform=platform)
        for k in range(hosts)
    ]


@pytest.mark.parametrize(
    ("kind", "name", "bandwidth"),
    [
        ("TPU v4", "tpu-v4", 300e9),
        ("TPU v5 lite", "tpu-v5e", 200e9),
        ("TPU v5", "tpu-v5p", 600e9),
        ("TPU v6 lite", "tpu-v6e", 400e9),
        ("TPU7x", "tpu-v7x", 300e9),
        ("NVIDIA A100-SXM4-80GB", "nvlink3", 300e9),
        ("NVIDIA H100 80GB HBM3", "nvlink4", 450e9),
        ("NVIDIA B200", "nvlink5", 900e9),
    ],
)
def test_the_kind_of_device_says_what_joins_them(kind, name, bandwidth):
    wires = interconnect_on(None, machine(kind))
    assert (wires.name, wires.bandwidth) == (name, bandwidth)
    assert interconnect_on(wires, machine(kind)) is wires
    assert interconnect_on(WIRES, machine(kind)) is WIRES
    network = sm.Interconnect.KNOWN["ethernet-400g"]
    assert interconnect_on(network, machine(kind)) is network


def test_the_network_of_hosts_of_gpus_is_not_known():
    gpus = machine("NVIDIA H100 80GB HBM3", hosts=4, platform="gpu")
    assert interconnect_on(None, gpus) is None
    assert interconnect_on(None, machine("TPU v5 lite", hosts=4)).name == "tpu-v5e"
    assert interconnect_on(None, machine("an abacus")) is None


def test_the_interconnect_of_another_chip_is_refused():
    given = sm.Interconnect.KNOWN["tpu-v5e"]
    message = "'tpu-v5e' does not join devices of kind TPU v5, whose .* is 'tpu-v5p'"
    with pytest.raises(ValueError, match=message):
        interconnect_on(given, machine("TPU v5"))
    assert interconnect_on(given, machine("an abacus")) is given
    assert interconnect_on(given, jax.devices()) is given  # CPUs stand for others.


def test_every_interconnect_of_a_chip_is_known():
    for chip in CHIPS.values():
        assert chip.interconnect in sm.Interconnect.KNOWN


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("wet string", ValueError, "no interconnect is called 'wet string'"),
        (25e9, TypeError, "must be a name or an Interconnect"),
    ],
)
def test_what_is_no_interconnect_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        sm.explain(gather, interconnect=given)


@pytest.mark.parametrize(
    ("bandwidth", "latency", "error", "message"),
    [
        ("a", "b", TypeError, "the bandwidth of an Interconnect must be a number"),
        (1e9, None, TypeError, "the latency of an Interconnect must be a number"),
        (0, 1e-6, ValueError, "a bandwidth above 0 bytes per second"),
        (1e9, -1, ValueError, "a latency of at least 0 seconds"),
    ],
)
def test_impossible_numbers_are_refused(bandwidth, latency, error, message):
    with pytest.raises(error, match=message):
        sm.Interconnect(bandwidth, latency)
