"""Processes that something else starts: MPI."""

import os
import shutil
import subprocess
import sys

import pytest

MPI = """
import sys
import numpy as np
from mpi4py.futures import MPIPoolExecutor
from shardmap.planning.plan import plan
from tests.plan.run.test_engines import W, X, assert_bytes, score
if __name__ == "__main__":
    x = np.memmap(sys.argv[1], np.float32, "w+", shape=X.shape)
    x[:] = X
    made = plan(score, x, W, in_slices=({0: 40}, None))
    with MPIPoolExecutor() as pool:
        assert_bytes(made.run(x, W, executor=pool), made.run(x, W))
    print("the same")
"""


@pytest.mark.deep
def test_processes_of_mpi(tmp_path):
    pytest.importorskip("mpi4py", reason="the engine under test")
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec, which starts the processes")
    (tmp_path / "script.py").write_text(MPI)
    done = subprocess.run(
        [
            *(mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures"),
            *(tmp_path / "script.py", tmp_path / "x"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )
    assert done.stdout.endswith("the same\n"), done.stderr
