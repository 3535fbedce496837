"""The processes of ``executor=1``: what a script needs for them, and when they end."""

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from shardmap.planning.run.disk.checkpoint import TaskFile
from tests import command_line
from tests.plan.run.checks import W, X, assert_bytes

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")

SCRIPT = """
import time
import numpy as np
import shardmap as sm

class Out:
    shape, dtype = (64, 8), np.dtype("float32")

    def __setitem__(self, index, part):
        print("a shard is done", flush=True)
        time.sleep(100)

def main():
    x = np.ones((64, 8), np.float32)
    sm.plan(lambda x: x + 1, x, in_slices={0: 8}).run(x, out=Out(), executor=1)

"""


def test_a_daemonic_process_may_start_none(shard_plan, monkeypatch):
    """As the worker of a multiprocessing.Pool."""
    config = multiprocessing.current_process()._config
    monkeypatch.setitem(config, "daemon", True)
    with pytest.raises(RuntimeError, match=r"executor=2 starts .* a daemonic process"):
        shard_plan.run(X, W, executor=2)


def test_the_processes_write_the_checkpoint(shard_plan, tmp_path, monkeypatch):
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", X.dtype, (64, 4))
    with monkeypatch.context() as patch:
        patch.setattr(TaskFile, "save", None)
        options = {"executor": 1, "checkpoint": tmp_path / "kept"}
        got = shard_plan.run(X, W, out=(None, out), **options)
    assert_bytes(got, shard_plan.run(X, W))
    names = {path.name for path in (tmp_path / "kept").glob("*.bin")}
    assert names == {f"{stage}-{k}.bin" for stage in (0, 1) for k in range(8)}
    assert_bytes(shard_plan.run(X, W, checkpoint=tmp_path / "kept"), got)


def test_the_memory_of_one_process_is_no_checkpoint_for_others(shard_plan):
    with pytest.raises(ValueError, match=r"'memory://job' is in the memory of one pro"):
        shard_plan.run(X, W, executor=1, checkpoint="memory://job")


@pytest.mark.deep
def test_a_script_that_workers_cannot_import(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"{SCRIPT}main()")
    result = command_line.python(path)
    assert result.returncode == 1
    assert "if __name__ == '__main__':" in result.stderr  # Python's own advice.
    assert "the executor broke down while shard" in result.stderr.splitlines()[-1]


@pytest.mark.deep
def test_workers_end_with_a_program_that_is_killed(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f'{SCRIPT}if __name__ == "__main__": main()')
    with subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(command_line.ROOT)},
    ) as process:
        assert process.stdout.readline() == b"a shard is done\n"
        process.kill()
        # The workers have the same stdout, which ends with the last of them.
        assert process.communicate(timeout=20) == (b"", None)
