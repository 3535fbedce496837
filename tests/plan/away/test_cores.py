"""Processes of one machine have their shares of its cores."""

import os
import subprocess
import sys

import pytest

from shardmap.plan.away.cores import share_of
from shardmap.plan.plan import plan
from tests.plan.away.test_engines import W, X, assert_bytes, mapped, score

PROGRAM = """
import os, threading, time
# A thread that is there before, and may be the one that starts JAX.
seen = []
go = threading.Event()
def look():
    go.wait()
    seen.append(len(os.sched_getaffinity(0)))
thread = threading.Thread(target=look)
thread.start()
from shardmap.plan.away import cores
first = cores.take_share_of_all(1, 2)
go.set()
thread.join()
print(first, len(os.sched_getaffinity(0)), seen[0], cores.take_share_of_all(0, 2))
print(os.environ[cores.FRACTION])
import jax
assert "jaxlib" in __import__("sys").modules
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux has it")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="nothing to share")
def test_a_share_is_that_of_all_threads():
    if len(os.sched_getaffinity(0)) < os.cpu_count():
        pytest.skip("this process has a share already")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    half = os.cpu_count() // 2
    assert result.stdout.split() == ["True", f"{half}", f"{half}", "False", "0.450"]


def test_every_core_is_somebodys_and_nobody_has_none():
    for count in range(1, 9):
        shares = [share_of(range(5), index, count) for index in range(count)]
        assert all(shares)
        assert {core for share in shares for core in share} == set(range(5))


@pytest.mark.deep
def test_processes_of_a_run_have_their_cores(tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
    made = plan(score, X, W, in_slices=({0: 8}, None))
    assert_bytes(made.run(mapped(tmp_path), W, executor=2), made.run(X, W))
