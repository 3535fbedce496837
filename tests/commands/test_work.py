"""Tasks of a saved plan as processes of their own, some of which are killed."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from shardmap.commands import work
from shardmap.plan.plan import plan
from tests.plan.plan_programs import reals

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
ROOT = pathlib.Path(__file__).parents[2]
X = reals(640, 8)


def fun(x):
    y = x - x.mean(0, keepdims=True)
    return y, (y * y).sum(0)


@pytest.fixture
def job(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=X.shape)
    x[:] = X
    made = plan(fun, x, in_slices={0: 64})
    made.save(tmp_path / "job", x, tasks=64)
    return tmp_path / "job", made.run(x)


def start(path, *options, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "shardmap", "work", path, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    )


def told(process):
    out, error = process.communicate(timeout=300)
    return process.returncode, out + error


def assert_made(path, want):
    for k, value in enumerate(want):
        assert np.load(path / f"out/{k}.npy").tobytes() == value.tobytes()


@pytest.mark.deep
def test_a_killed_worker_loses_nothing(job):
    path, want = job
    process = start(path)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = [p for p in range(64) if not (path / f"done/0-{p}").exists()]
    assert left
    code, text = told(start(path, "--finish", "--processes", "2"))
    assert code == 0, text
    assert "result[0]: out/0.npy" in text
    assert_made(path, want)


def array(path, killed=()):
    """A loop of a shell over the tasks of an array job."""
    for task in range(64):
        process = start(
            path, SLURM_ARRAY_TASK_ID=str(task + 1), SLURM_ARRAY_TASK_MIN="1"
        )
        if task in killed:
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            process.communicate()
        else:
            assert told(process)[0] == 0


@pytest.mark.deep
@pytest.mark.parametrize("killed", [(), (0, 7, 20, 31, 44, 58)])
def test_an_array_job_of_64_tasks(killed, job):
    path, want = job
    array(path, killed)
    assert told(start(path, "--finish"))[0] == 0
    assert_made(path, want)


def test_tasks_and_states(job, capsys, monkeypatch):
    path, want = job
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert work.main([str(path)]) == 0
    assert "stage 1, part 3: 1 shards done" in capsys.readouterr().out
    assert work.main([str(path), "--status"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "stage 0: 64 of 64 parts done (64 shards), done",
        "stage 1: 1 of 64 parts done (64 shards), 0 under way",
    ]
    assert work.main([str(path), "--finish"]) == 0
    assert work.main([str(path), "--check"]) == 0
    assert capsys.readouterr().out.endswith("all is as it was made\n")
    assert_made(path, want)
    damaged = np.load(path / "out/0.npy", mmap_mode="r+")
    damaged[5] += 1
    damaged.flush()
    assert work.main([str(path), "--check"]) == 1
    assert capsys.readouterr().out == "1 shards are to be run again\n"


def test_wrong_options_are_told(job, capsys):
    path, _ = job
    with pytest.raises(SystemExit, match="2"):
        work.main([str(path), "--task", "64"])
    assert "--task must be from 0 to 63, got 64" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        work.main([str(path), "--processes", "0"])
    assert "--processes must be at least 1, got 0" in capsys.readouterr().err
    assert work.main([str(path.parent)]) == 2
    assert "is no job: made.save" in capsys.readouterr().err
    assert work.main([str(path), "--import", "no_such_module"]) == 2
    assert "No module named 'no_such_module'" in capsys.readouterr().err
