"""`python -m shardmap doctor`: what it finds, and when something is broken."""

import re

import pytest

from shardmap.commands import doctor
from tests.command_line import refusal, shardmap

# As a probe finds them on a good machine.
FOUND = {
    "platform": "gpu",
    "kind": "a GPU",
    "count": 8,
    "cores": 8,
    "x64": True,
    "disable_jit": False,
    "sum": 36.0,
    "right": 36.0,
}
FLAG = "--xla_force_host_platform_device_count"


def test_a_machine_where_all_is_well():
    result = shardmap("doctor", XLA_FLAGS=f"{FLAG}=4", JAX_PLATFORMS="cpu")
    assert result.stderr == ""
    assert result.returncode == 0
    assert re.search(r"^jax \d+\.\d+.*, jaxlib \d+", result.stdout, re.M)
    assert "ok      4 devices on platform cpu (cpu), " in result.stdout
    assert "ok      a psum over 4 devices is right" in result.stdout
    assert "\n  JAX_PLATFORMS=cpu\n" in result.stdout
    assert f"\n  XLA_FLAGS={FLAG}=4\n" in result.stdout
    assert "several runs with collectives in flight" in result.stdout
    assert "BROKEN" not in result.stdout


@pytest.mark.deep
def test_a_flag_that_ends_the_process_is_found():
    result = shardmap("doctor", XLA_FLAGS="--xla_no_such_flag=1")
    assert result.stderr == ""
    assert result.returncode == 1
    broken = re.findall(r"^BROKEN  (.*)$", result.stdout, re.M)
    assert len(broken) == 1
    assert broken[0].startswith("JAX does not start: ")
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in broken[0]


def test_a_start_that_takes_for_ever_is_found():
    assert doctor.start_jax(seconds=0.01) == {
        "error": "JAX did not start and run a map within 0.01 seconds"
    }


@pytest.mark.deep
def test_the_probe_sees_this_process():
    facts = doctor.start_jax()
    assert facts.keys() == FOUND.keys()
    wanted = {"platform": "cpu", "count": 8, "sum": 36.0, "right": 36.0}
    assert {key: facts[key] for key in wanted} == wanted


def test_a_wrong_sum_is_broken():
    assert list(doctor.devices(FOUND)) == [
        (False, "8 devices on platform gpu (a GPU), 8 CPU cores"),
        (False, "a psum over 8 devices is right"),
    ]
    assert list(doctor.devices({**FOUND, "sum": 8.0}))[1] == (
        True,
        "a psum over 8 devices is 8, not 36",
    )
    assert list(doctor.devices({"error": "no"})) == [(True, "JAX does not start: no")]


@pytest.mark.parametrize(
    ("changes", "environment", "limits"),
    [
        ({}, {}, []),
        ({"error": "no"}, {}, []),
        ({"count": 1}, {}, ["more than one device"]),
        ({"count": 1, "platform": "cpu"}, {}, ["more than one device"]),
        ({"platform": "cpu"}, {}, ["several runs with collectives in flight"]),
        ({"platform": "cpu"}, {"NPROC": "64"}, []),
        (
            {"platform": "cpu", "cores": 2},
            {"NPROC": "200"},
            ["t"],
        ),
        ({"x64": False}, {}, ["64-bit numbers"]),
        ({"disable_jit": True}, {}, ["measuring"]),
    ],
)
def test_limits_are_those_of_the_machine(changes, environment, limits):
    lines = doctor.limits({**FOUND, **changes}, environment)
    assert len(lines) == len(limits)
    for line, start in zip(lines, limits, strict=True):
        assert line.startswith(start)


def test_it_takes_no_arguments():
    assert refusal(doctor.main, "cpu") == "unrecognized arguments: cpu"
