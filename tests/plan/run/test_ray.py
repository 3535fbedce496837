"""Engines whose processes something else starts: Ray, and MPI beside it."""

import os
import shutil
import subprocess
import sys
import types
from concurrent.futures import Future

import pytest

from shardmap.planning.run.processes import RayExecutor, is_ray


class Remote:
    """A function of Ray, whose tasks are done at once."""

    def __init__(self, function):
        self.function = function

    def remote(self, *args):
        done = Future()
        done.set_result(self.function(*args))
        return types.SimpleNamespace(future=lambda: done)


def test_a_task_of_ray_is_a_future():
    ray = types.ModuleType("ray")
    ray.remote = Remote
    assert is_ray(ray)
    assert not is_ray(sys)
    assert not is_ray("ray")
    assert RayExecutor(ray).submit(divmod, 7, 2).result() == (3, 1)
    assert RayExecutor(ray).submit(int, "11", base=2).result() == 3


RAY = """
import ray
# Ray forks, which is to be done before JAX has threads.
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
import sys
import numpy as np
from shardmap.planning.plan import plan
from tests.plan.run.test_engines import W, X, assert_bytes, score
x = np.memmap(sys.argv[1], np.float32, "w+", shape=X.shape)
x[:] = X
made = plan(score, x, W, in_slices=({0: 8}, None))
assert_bytes(made.run(x, W, executor=ray), made.run(x, W))
print("the same")
"""


@pytest.mark.deep
def test_tasks_of_ray(tmp_path):
    pytest.importorskip("ray", reason="the engine under test")
    done = subprocess.run(
        [sys.executable, "-c", RAY, tmp_path / "x"],
        capture_output=True,
        text=True,
        env=os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout.endswith("the same\n"), done.stderr


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
    )
    assert done.stdout.endswith("the same\n"), done.stderr
