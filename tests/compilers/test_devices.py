"""Devices that only compile: of which kind, how many, and usable as devices are."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import shardmap as sm
from tests.command_line import ROOT

MACHINES = {
    "v5e:2x4": (8, 2, "TPU v5 lite"),
    "v5e:1x1": (1, 1, "TPU v5 lite"),
    "v4:2x2x2": (16, 2, "TPU v4"),
    "v5p:8x8x16": (1024, 256, "TPU v5"),
    "v6e:4x4": (16, 4, "TPU v6 lite"),
    "tpu7x:2x2x1": (8, 1, "TPU7x"),
    "h100:8": (8, 1, "NVIDIA H100 80GB HBM3"),
    "h100:32x8": (256, 32, "NVIDIA H100 80GB HBM3"),
    "h200:8": (8, 1, "NVIDIA H200"),
    "v5litepod-16": (16, 4, "TPU v5 lite"),
    "v5p-128": (64, 16, "TPU v5"),
    "2xv5e:2x4": (16, 4, "TPU v5 lite"),
    "a100:8": (8, 1, "NVIDIA A100-SXM4-80GB"),
}


def product(devices):
    """A map with a collective, compiled for these devices."""
    mean = sm.spmap(
        lambda x: jnp.tanh(x @ x) - jax.lax.pmean(x, "i"), "i", devices=devices
    )
    x = jax.ShapeDtypeStruct((len(devices), 64, 64), jnp.float32)
    return mean.lower(x).compile()


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_its_devices(name):
    devices = sm.devices(name)
    hosts = {device.process_index for device in devices}
    assert (len(devices), len(hosts), devices[0].device_kind) == MACHINES[name]
    # An array of one call may be given a mesh of another.
    again = sm.devices(name)
    assert again == devices
    assert again is not devices
    mesh = sm.make_mesh({"data": len(devices)}, devices)
    assert mesh == jax.sharding.Mesh(again, ("data",))
    if len(devices) == 8:
        compiled = product(devices)
        assert " all-reduce(" in compiled.as_text().replace("-start(", "(")
        (sharding,) = jax.tree.leaves(compiled.output_shardings)
        assert sharding.device_set == set(devices)


SCRIPT = """
import os
before = dict(os.environ)
import shardmap as sm
for name in "v5e:2x4", "h100:8":
    print(len(sm.devices(name)))
assert dict(os.environ) == before
import jax
print(jax.default_backend())
from tests.compilers.test_devices import product
product(sm.devices("v5e:2x4"))
product(sm.devices("h100:8"))
print("both", flush=True)
input()
"""


@pytest.mark.parametrize("platforms", ["cpu", None])
def test_two_processes_compile_at_once_without_settings_or_noise(platforms):
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS",)}
    if platforms is not None:
        kept["JAX_PLATFORMS"] = platforms
    path = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**kept, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        # Both hold the compilers until both have them.
        lines = [
            [each.stdout.readline().strip() for _ in range(4)] for each in processes
        ]
        ended = [each.communicate("\n", timeout=300) for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert lines == [["8", "8", "cpu", "both"]] * 2, ended
    for _, err in ended:
        assert "libtpu" not in err
        assert "TPU_" not in err
        assert "Traceback" not in err


def test_the_first_backend_is_not_disturbed():
    """Plugins that JAX has refused before are loaded for compiling all the same."""
    script = "import jax; print(jax.devices()[0].platform)\n" + SCRIPT
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        input="\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.split() == ["cpu", "8", "8", "cpu", "both"], result.stderr
