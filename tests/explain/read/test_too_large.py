"""Programs that do not fit, summaries of a line, and figures of kinds of devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explaining.chips import capacity_of, machine_of
from shardmap.explaining.read import too_large
from shardmap.explaining.report import Collective, Cost, Report
from tests.explain import explanations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
            "the total memory required for HLO temporaries (20.50G) exceeds available "
            "HBM (15.75G). HLO module: jit_f.",
            (22011707392, 16911433728),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 1.50T of "
            "512.0M hbm. Exceeded hbm capacity by 1.5T.",
            (1649267441664, 536870912),
        ),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes", None),
        ("INTERNAL: Unexpected device_id 4", None),
    ],
)
def test_what_a_compiler_says_of_memory(text, expected):
    assert too_large.refused(jax.errors.JaxRuntimeError(text)) == expected


def test_the_largest_values_are_as_on_one_device():
    def layer(x, w):
        return jnp.sin(x @ w)

    fun = sm.spmap(jax.jit(layer), "i", in_axes=(0, None), batch_size=2)
    x = jax.ShapeDtypeStruct((64, 128, 8), jnp.float32)
    w = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    report = sm.explain(fun)(x, w)
    jaxpr = jax.jit(fun).trace(x, w).jaxpr.jaxpr
    sine, product, argument, *_ = too_large.largest(jaxpr, report.inputs, 8)
    assert (sine.type, sine.bytes) == ("float32[2,128,1024]", 2 * 128 * 1024 * 4)
    assert {sine.operation, product.operation} == {"sin", "dot_general"}
    assert "test_too_large.py" in sine.source
    assert argument.type, argument.operation == ("float32[8,1024]", "argument w")


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
    results = [too_large.UNKNOWN if given == "arguments" else rows, too_large.UNKNOWN]
    ins, outs = too_large.shardings_of(fun.trace(*args))
    assert ins == [rows, columns, too_large.UNKNOWN]
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


def test_a_program_that_is_refused_says_nothing_of_what_it_sends():
    report = explanations.explanation(
        cost=Cost(peak_bytes=20 * GIB), capacity=16 * GIB, collectives=()
    )
    assert report.summary == "does not fit: 20.0 of 16 GiB a device"
    assert "Does not fit: 20.0 of 16 GiB a device." in str(report)
    assert report.fits is False
