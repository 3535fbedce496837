"""What runs take of fresh processes is at most what their plans say."""

import pathlib

import pytest

from tests.plan.run.peaks import PROGRAMS, in_a_fresh_process

QUICK = ("standardised", "elementwise chain", "running sum")
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.deep)
    for name in PROGRAMS
]
STATUS = pathlib.Path("/proc/self/status")


@pytest.mark.deep
@pytest.mark.skipif(not STATUS.exists(), reason="reads anonymous memory from /proc")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_at_most_what_its_plan_says(name, tmp_path):
    found = in_a_fresh_process("tests.plan.run.peaks", name, tmp_path)
    assert found["took"] <= 1.1 * found["said"] + found["own"]
