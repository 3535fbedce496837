"""Maps over several processes, which the tests start on this machine.

The checks themselves are in process_programs/; each start runs many.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.arrays import process_local, processes
from shardmap.map import layout
from tests.arrays.start import PROGRAMS, start
from tests.command_line import python

# For other numbers of processes and devices than those that all checks are made with;
# the first four for a quick run.
FEW = [
    "check_rows_in_rows_out",
    "check_global_in_global_out",
    "check_mesh_maps_are_told_apart",
    "check_callbacks_of_this_process",
    "check_collectives",
    "check_soft_and_ragged_rows",
    "check_grad_outside",
    "check_parts_of_global_arrays",
]


class Client:
    """That of devices which run programs."""

    runtime_type = "cpu"


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as a mesh looks at."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    client: type = Client


def devices_of(*processes):
    return [Device(k, process) for k, process in enumerate(processes)]


def test_devices_by_process():
    devices = devices_of(1, 1, 0, 0)
    assert processes.by_process(devices) == [devices[:2], devices[2:]]


@pytest.mark.parametrize(
    ("order", "least"), [((0, 1, 0, 1), 2), ((0, 0, 0, 1), 1), ((0, 1, 0), 1)]
)
def test_devices_that_give_no_contiguous_rows_are_refused(order, least):
    with pytest.raises(
        ValueError,
        match=rf"stand together.* of processes {re.escape(str(list(order)))}.*"
        rf"sort them by process_index and give {least} of each process\.",
    ):
        processes.by_process(devices_of(*order))


@pytest.mark.parametrize(
    ("elements", "inner", "shape", "ids"),
    [
        (8, None, (8,), [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, None, (2,), [0, 4]),
        (12, None, (6,), [0, 1, 2, 4, 5, 6]),
        (10, None, (2,), [0, 4]),
        (7, None, (7,), [0, 1, 2, 3, 4, 5, 6]),
        (4, 2, (4, 2), [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 3, (2, 3), [0, 1, 2, 4, 5, 6]),
    ],
)
def test_each_process_has_its_own_part_of_the_mesh(elements, inner, shape, ids):
    def body(x):
        return x if inner is None else sm.spmap(lambda y: y)(x)

    jaxpr = jax.make_jaxpr(body)(np.ones(inner or 1)).jaxpr
    mesh, *_ = layout.map_mesh(
        "i", elements, jaxpr, devices_of(0, 0, 0, 0, 1, 1, 1, 1), use_all_devices=False
    )
    assert mesh.devices.shape == shape
    assert [device.id for device in mesh.devices.flat] == ids


@pytest.mark.deep
def test_a_description_has_nothing_of_this_process_in_it():
    described = """
import jax, numpy as np, shardmap as sm
from shardmap.map import agreement
from shardmap.map.primitives.map_primitive import MapParams

class Name:
    pass

def body(x):
    return jax.nn.relu(x) + jax.pure_callback(np.sin, x, x) + jax.lax.psum(x, name)

name = Name()
jaxpr = jax.make_jaxpr(sm.spmap(body, name))(np.ones(8))
text = agreement.description(MapParams.of(jaxpr.eqns[0]))
print(text)
"""
    here = {}
    exec(described, here)
    there = python("-c", described, without=(), PYTHONHASHSEED="1").stdout
    assert there == f"{here['text']}\n"
    assert there.startswith("body, an axis of 8")


def test_the_time_limit(monkeypatch):
    assert processes.time_limit() == 600
    for text in "a while", "-1", "nan":
        monkeypatch.setenv(processes.TIME_LIMIT, text)
        with pytest.raises(ValueError, match=f"a number of seconds, but is '{text}'"):
            processes.time_limit()


def test_rows_of_arrays_that_are_cut_otherwise_too_are_refused(monkeypatch):
    mesh = sm.make_mesh({"i": 4, "j": 2})
    half = jax.sharding.Mesh(mesh.devices[:2, :1], mesh.axis_names)
    monkeypatch.setattr(process_local, "_local_mesh", lambda mesh: half)
    process_local.shardings_along.cache_clear()
    with pytest.raises(
        ValueError, match="a map inside cuts dimension 1 of an array between processes"
    ):
        process_local.shardings_along(NamedSharding(mesh, P("i", "j")), 0, 2)
    made = process_local.shardings_along(NamedSharding(mesh, P(None, "i")), 1, 2)
    assert made.global_shape((5, 6)) == (5, 12)
    assert made.local_shape((5, 12)) == (5, 6)
    process_local.shardings_along.cache_clear()


def checks_in(path):
    return re.findall(r"^def (check_\w+)", path.read_text(), re.M)


ALL = [name for path in sorted(PROGRAMS.glob("check_*.py")) for name in checks_in(path)]
HALVES = [ALL[::2], ALL[1::2]]


@pytest.mark.parametrize(
    ("count", "devices", "wanted"),
    [
        pytest.param(2, 2, FEW[:4], id="2-2"),
        *(
            pytest.param(2, 2, half, id=f"2-2-{k}", marks=pytest.mark.deep)
            for k, half in enumerate(HALVES)
        ),
        pytest.param(4, 1, FEW, id="4-1", marks=pytest.mark.deep),
    ],
)
def test_what_holds_in_every_process(count, devices, wanted):
    result = start(count, devices, "checks.py", *wanted)
    passed = re.findall(r"^\[(\d)\] (check_\w+) passed$", result.stdout, re.M)
    expected = {(str(process), name) for process in range(count) for name in wanted}
    assert expected - set(passed) == set(), result.stdout + result.stderr
    assert result.returncode == 0


@pytest.mark.deep
def test_the_command_keeps_to_this_machine():
    """Whatever the environment says of proxies, and of who may listen where."""
    check = "check_the_coordinator_listens_here_alone"
    result = start(
        *(2, 1, "checks.py", check),
        JAX_COORDINATOR_BIND_ADDRESS="0.0.0.0:1",
        http_proxy="http://127.0.0.1:9",
        https_proxy="http://127.0.0.1:9",
    )
    passed = sorted(line for line in result.stdout.splitlines() if "check" in line)
    assert passed == [f"[{k}] {check} passed" for k in range(2)], result.stderr
