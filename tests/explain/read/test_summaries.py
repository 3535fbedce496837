"""Programs that do not fit, summaries of a line, and figures of kinds of devices."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explaining.chips import capacity_of, machine_of
from shardmap.explaining.read.arrays import UNKNOWN, shardings_of
from shardmap.explaining.report import Collective, Cost, Report
from tests.explain import explanations


@pytest.mark.parametrize("given", ["arguments", "in_shardings", "inside"])
def test_shardings_are_known_before_a_program_is_compiled(given):
    mesh = sm.make_mesh({"data": 4, "model": 2})
    rows, columns = (
        NamedSharding(mesh, P("data")),
        NamedSharding(mesh, P(None, "model")),
    )

    def step(x, w, unused):
        return x @ w, w.sum()

    kept = {"in_shardings": (rows, columns, None), "out_shardings": (rows, None)}
    fun = jax.jit(step, **kept if given != "arguments" else {})
    if given == "inside":
        fun = jax.jit(lambda *args, fun=fun: fun(*args))
    shardings = (rows, columns, None) if given == "arguments" else (None,) * 3
    args = [
        jax.ShapeDtypeStruct((8, 8), np.float32, sharding=each) for each in shardings
    ]
    results = [UNKNOWN if given == "arguments" else rows, UNKNOWN]
    ins, outs = shardings_of(fun.trace(*args))
    assert ins == [rows, columns, UNKNOWN]
    assert outs == results


GIB = 2**30
SENT = Collective("all-reduce", "psum", ("i",), 8, 2, 1000, 1000, None, False)


def cost(peak):
    return Cost(None, None, peak, 0, None, None)


@pytest.mark.parametrize(
    ("report", "summary"),
    [
        (
            Report(
                "f",
                device_kind="TPU v5 lite",
                cost=cost(int(3.2 * GIB)),
                capacity=int(15.75 * GIB),
                collectives=(SENT,),
                least_times=(("arithmetic", 2e-4), ("interconnect", 1e-4)),
            ),
            "fits: 3.2 of 15.75 GiB a chip; sends 3.4 KiB a step; at least 200 us",
        ),
        (
            Report(
                "f",
                device_kind="NVIDIA H100 80GB HBM3",
                cost=cost(90 * GIB),
                capacity=80 * GIB,
            ),
            "does not fit: 90.0 of 80 GiB a GPU; sends nothing",
        ),
        (
            Report("f", device_kind="cpu", cost=cost(12)),
            "needs 12 B a device; sends no",
        ),
        (Report("f"), "sends nothing"),
    ],
)
def test_a_summary_is_a_line(report, summary):
    assert report.summary.startswith(summary)


def test_what_bounds_the_time_is_what_takes_longest():
    report = Report("f", least_times=(("memory", 1e-6), ("arithmetic", 2e-6)))
    assert (report.least_seconds, report.bound_by) == (2e-6, "arithmetic")
    assert (Report("f").least_seconds, Report("f").bound_by) == (None, None)
    assert report.to_dict()["bound_by"] == "arithmetic"


def device(kind, platform="tpu", **attributes):
    client = types.SimpleNamespace(runtime_type="compile_only_runtime")
    return types.SimpleNamespace(
        device_kind=kind, platform=platform, client=client, **attributes
    )


def test_a_machine_is_told_by_its_shape():
    chips = [
        device("TPU v5 lite", coords=(x, y, 0), process_index=x // 2)
        for x in range(4)
        for y in range(2)
    ]
    assert machine_of(chips) == "TPU v5 lite, 4 x 2"
    assert machine_of(chips[:1]) == "TPU v5 lite, 1 x 1"
    gpus = [device("H", "gpu", process_index=k // 4) for k in range(8)]
    assert machine_of(gpus) == "H, 2 hosts of 4"
    assert capacity_of(chips[0]) == int(15.75 * GIB)
    assert capacity_of(gpus[0]) is None
    assert capacity_of(jax.devices()[0]) is None


@pytest.mark.parametrize("capacity", [16, 20])
def test_a_program_that_is_refused_does_not_fit(capacity):
    report = explanations.explanation(
        cost=Cost(peak_bytes=20 * GIB), capacity=capacity * GIB, collectives=()
    )
    assert report.summary == f"does not fit: 20.0 of {capacity} GiB a device"
    assert f"Does not fit: 20.0 of {capacity} GiB a device." in str(report)
    assert report.fits is False
