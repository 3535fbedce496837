"""Devices of machines that are not here: their names, and without their compilers."""

import pytest

import shardmap as sm
from tests.command_line import python

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


UNKNOWN = "", "v5e", "v5e:", "v5e:2", "v5e:2x2x2", "v5e:0x2", "v5e:2x4 ", "V5E:2x4"
UNKNOWN += "v4:2x2", "h100", "h100:8x8x8", "h100:0", "v9:2x2", "cpu:8", "h100:8\n"


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_machine_that_is_not_known_is_told_what_is(name):
    known = r"^devices knows no .*'v5e:16x16'.*'h100:32x8'"
    with pytest.raises(ValueError, match=known):
        sm.devices(name)


def test_a_count_of_devices_is_refused():
    with pytest.raises(
        TypeError, match=r"the name of a machine, got 8\. Give TPUs with"
    ):
        sm.devices(8)


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
