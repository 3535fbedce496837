"""The example of training that is stopped and goes on, in processes that are killed."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.command_line import SETTINGS

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 300


def start(folder, steps=STEPS):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "shardmap", "run", "-n", "2"),
            *("--devices-per-process", "1", str(ROOT / "examples" / "resume.py")),
            *("--folder", str(folder), "--steps", str(steps)),
        ],
        env={k: v for k, v in os.environ.items() if k not in SETTINGS}
        | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def checkpoint(folder):
    with np.load(folder / "checkpoint.npz") as saved:
        return dict(saved)


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"the example has ended without {text!r}")


@pytest.mark.deep
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    whole = start(tmp_path / "whole")
    killed = start(tmp_path / "killed")
    try:
        # The first process is the one that writes, before it says so.
        wait_for(killed, "[0] step 40:")
        killed.kill()
        killed.communicate(timeout=300)
        step = int(checkpoint(tmp_path / "killed")["step"])
        assert 40 <= step < STEPS
        killed = start(tmp_path / "killed")
        wait_for(killed, f"begins at step {step}")
        for process in (whole, killed):
            process.communicate(timeout=300)
            assert process.returncode == 0
    finally:
        for process in (whole, killed):
            process.kill()
            process.communicate()
    expected = checkpoint(tmp_path / "whole")
    resumed = checkpoint(tmp_path / "killed")
    assert int(resumed["step"]) == STEPS
    assert {k: v.tobytes() for k, v in resumed.items()} == {
        k: v.tobytes() for k, v in expected.items()
    }
