"""An array job whose folder is in an S3 server, and whose tasks are killed."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import command_line
from tests.plan.run.checks import W, X, assert_bytes

TASK = """
import sys, time
import numpy as np
from shardmap.planning.plan import plan
from tests.plan.run.checks import Recorded, W, X, columns

class Slow(Recorded):
    def __getitem__(self, index):
        time.sleep(0.1)
        return super().__getitem__(index)

made = plan(columns, X, W, in_slices=({0: 8}, None))
print("begins", flush=True)
task = int(sys.argv[1]), 2
result = made.run(Slow(X), W, checkpoint="s3://bucket/job", task=task)
if result is not None:
    np.savez(sys.argv[2], *result)
"""


@pytest.mark.deep
def test_tasks_are_killed_at_random_times(s3, shard_plan, tmp_path):
    random, result = np.random.default_rng(0), tmp_path / "result.npz"

    def start(index):
        task = subprocess.Popen(
            [sys.executable, "-c", TASK, str(index), result],
            cwd=command_line.ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
        )
        assert task.stdout.readline() == b"begins\n"
        return task

    tasks = [start(0), start(1)]
    try:
        for k in range(4):
            time.sleep(random.uniform(0, 2))
            tasks[k % 2].kill()
            tasks[k % 2].communicate()
            tasks[k % 2] = start(k % 2)
        assert [task.wait(timeout=300) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
            task.communicate()
    with np.load(result) as got:
        assert_bytes(got.values(), shard_plan.run(X, W))
    names = [path.rpartition("/")[2] for path in s3.ls("bucket/job")]
    assert {"plan.json", *(f"{k}-{n}.bin" for k in (0, 1) for n in range(8))} < {*names}
