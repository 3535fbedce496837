"""README.md: its programs run as pasted, on one device and on eight."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def expected(block):
    """The lines of comments, which are what the program prints."""
    return [line[2:] for line in block.splitlines() if line.startswith("# ")]


def printed(program, devices, tmp_path):
    """Runs a file in a fresh process, in which JAX has so many devices at first."""
    path = tmp_path / "pasted.py"
    path.write_text(program)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    root = str(pathlib.Path(__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, str(path)],
        env=kept
        | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("devices", ["1", pytest.param("8", marks=pytest.mark.deep)])
def test_the_blocks_run_as_pasted(devices, tmp_path):
    assert len(BLOCKS) == 4
    assert all(expected(block) for block in BLOCKS)
    lines = printed("\n".join(BLOCKS), devices, tmp_path)
    assert lines == [line for block in BLOCKS for line in expected(block)]


def test_a_wrong_output_is_noticed():
    assert expected("print(1)  # one\n# 1\nx = '# 2'\n") == ["1"]


def test_installing_stands_on_the_first_screen():
    first = README.partition("\n## ")[0].splitlines()
    for command in ("pip install .", "make demo", "make test"):
        assert any(line.startswith(f"    {command}") for line in first)
    assert len(README.splitlines()) <= 140
