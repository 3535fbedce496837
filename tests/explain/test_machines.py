"""Names of machines: those of vendors, and the nearest to a wrong one."""

import pytest

import shardmap as sm
from shardmap.explaining.machines import machine_named
from tests.command_line import python


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-256", "v5e:16x16"),
        ("v6e-8", "v6e:2x4"),
        # These count cores, two to a chip.
        ("v4-8", "v4:2x2x1"),
        ("v5p-64", "v5p:2x4x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-2048", "v5p:8x8x16"),
        ("v5p-12288", "v5p:16x16x24"),
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("V5E:2x4", "v5e:2x4"),
        ("H100:1x8", "h100:8"),
        ("h200:4x8", "h200:4x8"),
        ("2xv5e:16x16", "2xv5e:16x16"),
        ("4xv5p-128", "4xv5p:4x4x4"),
    ],
)
def test_a_machine_has_the_names_that_vendors_use(name, machine):
    assert str(machine_named(name)) == machine
    assert machine_named(machine) == machine_named(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5e:3x5", "v5e:4x4"),
        ("v5e:4x2", "v5e:2x4"),
        ("v5e:64x64", "v5e:16x16"),
        ("v6e:32x32", "v6e:16x16"),
        ("v5p:64x64x64", "v5p:16x16x24"),
        ("v5litepod-12345", "v5e:16x16"),
        ("2xv6e-7", "2xv6e:2x4"),
        ("v5p-3", "v5p:1x1x1"),
        ("v4:2x2", "v4:2x2x1"),
        ("v5x:2x2", "v5e:2x2"),
        ("h100", "h100:8"),
        ("h100:0", "h100:8"),
        ("h100:12", "h100:2x8"),
        ("h100:1000", "h100:125x8"),
        ("2xh100:8", "h100:8"),
    ],
)
def test_what_nobody_can_rent_is_refused_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=rf"^devices knows no '{name}'") as caught:
        sm.devices(name)
    assert f" Did you mean '{near}'? Give TPUs with the chips along" in str(
        caught.value
    )
    assert str(machine_named(near)) == near


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match=r"the name of a machine, got 5\. Give TPUs"):
        sm.devices(5)
    for name in ("", "5", "v5e:", "v5e:2x", "cpu:8", "a machine"):
        with pytest.raises(ValueError, match=r"knows no .*Give TPUs.*h100:32x8"):
            sm.devices(name)


def test_a_host_has_up_to_eight_gpus():
    with pytest.raises(ValueError, match=r"'h100:1000': one host has up to 8 GPUs"):
        sm.devices("h100:1000")


WITHOUT = """
import os, sys
import jax
import shardmap as sm

sys.modules |= dict.fromkeys(("libtpu", "jax_plugins"))
before = dict(os.environ)
for name in "v5e:2x4", "h100:2x8":
    try:
        sm.devices(name)
    except ImportError as error:
        print(error)
assert dict(os.environ) == before
print(jax.devices()[0].platform)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("platforms", ["cpu", ""])
def test_without_a_compiler_the_error_is_how_to_install_it(platforms):
    result = python("-c", WITHOUT, JAX_PLATFORMS=platforms)
    tpu, gpu, platform = result.stdout.splitlines()
    assert tpu.startswith("devices('v5e:2x4') needs the compiler of these devices")
    assert "pip install libtpu==0.0." in tpu
    assert tpu.endswith("(shardmap's extra 'tpu-compiler').")
    assert gpu.startswith("devices('h100:2x8') needs the compiler of these devices")
    assert "pip install 'jax[cuda12-local]' nvidia-cuda-nvcc-cu12" in gpu
    assert platform == "cpu"
    assert result.stderr == ""
