"""What runs take of fresh processes is at most what their plans say."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.plan.run.peaks import PROGRAMS

QUICK = ("standardised", "elementwise chain", "running sum")
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.deep)
    for name in PROGRAMS
]
STATUS = pathlib.Path("/proc/self/status")


@pytest.mark.skipif(not STATUS.exists(), reason="reads anonymous memory from /proc")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_at_most_what_its_plan_says(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.run.peaks", name, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        # Else the allocator keeps what is freed, as it likes.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["took"] <= 1.1 * found["said"] + found["own"]
