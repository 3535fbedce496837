"""Times of collectives: formulas, names, and the user's own numbers."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.explaining.chips import CHIPS, wiring_of

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


def test_a_time_is_that_of_the_bytes_or_of_the_farthest_message():
    assert WIRES.time("all-gather", 1000, 8) == 7.0
    assert WIRES.time("all-gather", 1, 8) == 0.5
    assert WIRES.time("all-gather", 1, 8, hops=4) == 2.0


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
    assert sent.link_bytes == 700
    assert sent.seconds == pytest.approx(700 / 1000)
    assert report.seconds == report.to_dict()["seconds"] == sent.seconds
    assert report.to_dict()["interconnect"]["name"] == "string"
    assert "Together at least 700 ms, on string: " in str(report)
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


def machine(kind, hosts=1, each=1):
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    return [
        SimpleNamespace(
            device_kind=kind, process_index=k // each, platform=platform, coords=[k, 0]
        )
        for k in range(hosts * each)
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
    wires = wiring_of(None, machine(kind)).inside
    assert (wires.name, wires.bandwidth) == (name, bandwidth)
    assert wiring_of(wires, machine(kind)).inside is wires
    assert wiring_of(WIRES, machine(kind)).inside is WIRES
    network = sm.Interconnect.KNOWN["ethernet-400g"]
    assert wiring_of(network, machine(kind)).inside is network
    assert wiring_of(None, machine("an abacus")) is None


def torus(kind, *sizes, slices=1):
    return [
        SimpleNamespace(
            device_kind=kind,
            platform="tpu",
            process_index=0,
            coords=place,
            slice_index=k,
        )
        for k in range(slices)
        for place in np.ndindex(*sizes)
    ]


N = 2**26
PAIRS = [(k, k + 1) for k in range(0, 256, 2)]
ALL, ROWS = [range(256)], [range(k, k + 16) for k in range(0, 256, 16)]


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        # Four links of 50 GB/s; two for one of the two dimensions.
        ("all-reduce", ALL, 2 * N * 255 / 256 / 200e9),
        ("all-gather", ROWS, 15 * N / 100e9),
        # Two neighbours have one link.
        ("all-gather", PAIRS, N / 50e9),
        ("all-to-all", PAIRS, N / 2 / 50e9),
        ("collective-permute", [(0, 1), (1, 2)], N / 100e9),
        ("collective-permute", [(0, 1), (15, 16)], N / 200e9),
        # 128 chips send half of their bytes over 2 x 16 links.
        ("all-to-all", ALL, 128 * N / 2 / (32 * 50e9)),
        ("all-to-all", ROWS, 8 * N / 2 / (2 * 50e9)),
    ],
)
def test_a_collective_uses_the_links_of_its_dimensions(kind, groups, seconds):
    wires = wiring_of(None, torus("TPU v5 lite", 16, 16))
    assert wires.time(kind, N, groups) == pytest.approx(seconds)


def test_a_message_passes_half_of_a_torus():
    wires = wiring_of(None, torus("TPU v5", 4, 4, 8))
    assert wires.time("all-reduce", 4, [range(128)]) == pytest.approx(8e-6)
    assert wires.time("all-reduce", 4, [range(8)]) == pytest.approx(4e-6)
    assert wires.time("collective-permute", 4, [(0, 1)]) == pytest.approx(1e-6)


H100 = "NVIDIA H100 80GB HBM3"
HOST, ACROSS, EVERY = (
    [range(8), range(8, 16)],
    [(k, k + 8) for k in range(8)],
    [range(16)],
)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all-reduce", HOST, 2 * N * 7 / 8 / 450e9),
        ("all-reduce", ACROSS, 2 * N / 2 / 50e9),
        # Inside each host, then an eighth of it between them.
        ("all-reduce", EVERY, 2 * N * 7 / 8 / 450e9),
        ("all-gather", EVERY, 14 * N / 450e9),
        ("reduce-scatter", ACROSS, N / 2 / 50e9),
        ("all-to-all", EVERY, N / 2 / 50e9),
        ("collective-permute", [(0, 1), (7, 8)], N / 50e9),
        ("collective-permute", [(0, 1)], N / 450e9),
    ],
)
def test_hosts_with_gpus_have_a_network_between_them(kind, groups, seconds):
    gpus = machine(H100, hosts=2, each=8)
    assert wiring_of(None, gpus).between is sm.Interconnect.KNOWN["infiniband-ndr"]
    assert wiring_of(None, gpus).time(kind, N, groups) == pytest.approx(seconds)
    # What is given is the network, unless it is NVLink itself.
    links = sm.Interconnect.KNOWN["nvlink4"]
    assert wiring_of(WIRES, gpus)[:2] == (links, WIRES)
    assert wiring_of(links, gpus) == wiring_of(None, gpus)


def test_slices_of_tpus_have_a_network_between_them():
    wires = wiring_of(None, torus("TPU v5 lite", 2, 4, slices=2))
    assert wires.time("all-reduce", N, HOST) == pytest.approx(2 * N * 7 / 8 / 200e9)
    # A quarter of a host's 100 Gb/s.
    assert wires.time("all-reduce", N, ACROSS) == pytest.approx(N / (25e9 / 8))


def test_the_interconnect_of_another_chip_is_refused():
    given = sm.Interconnect.KNOWN["tpu-v5e"]
    message = "'tpu-v5e' does not join devices of kind TPU v5, whose .* is 'tpu-v5p'"
    with pytest.raises(ValueError, match=message):
        wiring_of(given, machine("TPU v5"))
    assert wiring_of(given, machine("an abacus")).inside is given
    assert wiring_of(given, jax.devices()).inside is given  # CPUs stand for others.


def test_every_interconnect_of_a_chip_is_known():
    for chip in CHIPS.values():
        assert {chip.interconnect, chip.network} <= {*sm.Interconnect.KNOWN}


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
