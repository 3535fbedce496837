"""What runs take of fresh processes is at most what their plans say."""

import pathlib

import pytest

from tests.plan.run.peaks import MEMORY, PRODUCTS, in_a_fresh_process

NAMES = ("standardised", "running sum", "product", "sorted rows", "FFT of rows")
RUNTIME = 10 * 2**20
"""What docs/plan.md says that the runtime, the compiler and their threads take."""

STATUS = pathlib.Path("/proc/self/status")


pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not STATUS.exists(), reason="reads anonymous memory from /proc"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_at_most_what_its_plan_says(name, tmp_path):
    found = in_a_fresh_process("tests.plan.run.peaks", name, tmp_path)
    assert found["took"] <= 1.1 * found["said"] + found["own"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_takes_at_most_the_memory_it_was_given(name, tmp_path):
    # Threads of the compiler may hold more for a moment on a busy machine.
    tries = [in_a_fresh_process("tests.plan.run.peaks", name, tmp_path) for _ in "12"]
    assert all(each["said"] <= MEMORY for each in tries)
    assert min(each["took"] for each in tries) <= MEMORY + RUNTIME
