"""Tasks of an array job: the same bytes, whatever is killed, late or damaged."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.run import array_job
from shardmap.planning.run.workers import ShardError
from tests.plan.plan_programs import reals
from tests.plan.run.checks import (
    Recorded,
    W,
    X,
    assert_bytes,
    flip,
    read_by_shards,
    zero,
)


def run_tasks(shard_plan, *args, count=3, **options):
    """The result of an array job whose tasks run at the same time."""
    with ThreadPoolExecutor(count) as pool:
        *others, last = pool.map(
            lambda k: shard_plan.run(*args, task=(k, count), **options), range(count)
        )
    assert others == [None] * (count - 1)
    return last


def moments(x):
    mean = x.mean(0)
    y = jnp.tanh(x - mean[None])
    return mean, (y * y).sum(), y, y.max(0), jnp.cumsum(y, 0), x


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("pieces", "count"), [({0: 7}, 1), ({0: 7}, 3), ({0: 60, 1: 2}, 2), ({0: 3}, 5)]
)
def test_tasks_give_the_bytes_of_one_run(pieces, count, tmp_path):
    x = reals(60, 8)
    shard_plan = plan(moments, x, in_slices=pieces)
    got = run_tasks(shard_plan, x, count=count, checkpoint=tmp_path)
    assert_bytes(got, shard_plan.run(x))


@pytest.mark.parametrize("count", [1, 3])
def test_a_job_for_each_stage(count, tmp_path):
    """Its tasks run one after the other: none waits for one that comes later."""
    x = reals(60, 8)
    shard_plan = plan(moments, x, in_slices={0: 7})
    jobs = [(s, k) for s in range(len(shard_plan.stages)) for k in range(count)]
    assert len(jobs) > count
    *before, last = [
        shard_plan.run(x, checkpoint=tmp_path, task=(k, count), stage=stage)
        for stage, k in jobs
    ]
    assert before == [None] * (len(jobs) - 1)
    assert_bytes(last, shard_plan.run(x))


def test_a_stage_without_those_before_is_told(shard_plan, tmp_path):
    with pytest.raises(ValueError, match=r"stage=1 needs 0-0.bin of stage 0.*run all"):
        shard_plan.run(X, W, checkpoint=tmp_path, task=(0, 2), stage=1)
    with pytest.raises(IndexError, match="2 is out of range of stages: there are 2"):
        shard_plan.run(X, W, checkpoint=tmp_path, task=(0, 2), stage=2)
    with pytest.raises(ValueError, match="stage needs task: it is the stage that an a"):
        shard_plan.run(X, W, checkpoint=tmp_path, stage=0)


def test_large_values_that_later_stages_need_are_read_from_the_folder(tmp_path):
    """Rows are sorted, then columns: each shard reads boxes of all the first ones."""
    x = reals(512, 1024)
    shard_plan = plan(lambda x: jnp.sort(jnp.sort(x, 1), 0), x, in_slices={0: 2, 1: 2})
    got = run_tasks(shard_plan, x, count=2, checkpoint=tmp_path)
    np.testing.assert_array_equal(got, np.sort(np.sort(x, 1), 0))


def test_a_plan_of_one_stage_runs_task_by_task(tmp_path):
    shard_plan = plan(lambda x: (x.sum(0), x * 2), X, in_slices={0: 40})
    x, out = Recorded(X), (None, np.zeros_like(X))
    got = [
        shard_plan.run(x, checkpoint=tmp_path, task=(k, 3), out=out, executor=executor)
        for k, executor in enumerate((None, ThreadPoolExecutor(2), None))
    ]
    assert got[:2] == [None, None]
    assert got[2][1] is out[1]
    assert_bytes(got[2], shard_plan.run(X))
    assert len(read_by_shards(x)) == 40
    again = Recorded(X)
    assert_bytes(shard_plan.run(again, checkpoint=tmp_path, task=(2, 3)), got[2])
    assert_bytes(shard_plan.run(again, checkpoint=tmp_path), got[2])
    assert read_by_shards(again) == []


def test_a_task_that_failed_is_started_again(shard_plan, tmp_path, capfd):
    x = Recorded(X, failures=[(40, 1)])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shard_plan.run, X, W, checkpoint=tmp_path, task=(0, 2))
        with pytest.raises(ShardError, match="the disk is gone"):
            shard_plan.run(x, W, checkpoint=tmp_path, task=(1, 2))
        got = shard_plan.run(X, W, checkpoint=tmp_path, task=(1, 2))
        assert first.result() is None
    assert_bytes(got, shard_plan.run(X, W))
    told = capfd.readouterr().err
    assert f"task 0 of 2 waits for task 1: {tmp_path}" in told
    assert told.count("task 0 of 2 waits for task 1") <= 2  # Once in each stage.


def test_a_task_says_again_for_which_it_waits(shard_plan, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(array_job, "TOLD", 0.2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shard_plan.run, X, W, checkpoint=tmp_path, task=(0, 2))
        told, end = "", time.monotonic() + 120
        while told.count("task 0 of 2 waits") < 3 and time.monotonic() < end:
            told += capfd.readouterr().err
        shard_plan.run(X, W, checkpoint=tmp_path, task=(1, 2))
        assert first.result() is None
    lines = told.splitlines()[:3]
    assert lines == lines[:1] * 3
    assert "is not there yet. If task 1 has failed, start it again" in lines[0]


def total(x, w):
    return x.sum(0), (x @ w).max(0)


def test_the_last_task_alone_makes_damaged_files_of_others_again(tmp_path):
    shard_plan = plan(total, X, W, in_slices=({0: 40}, None))
    for k in range(3):
        got = shard_plan.run(X, W, checkpoint=tmp_path, task=(k, 3))
    for path in tmp_path.glob("*.fold"):
        if path.match("*-0.fold"):  # Of shards of the first two tasks.
            zero(path)
        else:
            path.unlink()
    flip(tmp_path / "0-3.bin")
    assert_bytes(shard_plan.run(X, W, checkpoint=tmp_path, task=(2, 3)), got)


@pytest.mark.parametrize(
    ("task", "match"),
    [
        (3, r"task must be a pair \(index, count\).*got 3"),
        ((1, 2, 3), r"task must be a pair \(index, count\)"),
        ((2, 2), "the index of task must be less than its count 2, got 2"),
        ((-1, 2), "the index of task must be at least 0, got -1"),
        ((0, 0), "the count of task must be at least 1, got 0"),
        ((0, 1.5), "the count of task must be an integer"),
    ],
)
def test_what_is_no_task_is_refused(task, match, shard_plan, tmp_path):
    with pytest.raises((TypeError, ValueError), match=match):
        shard_plan.run(X, W, checkpoint=tmp_path / "job", task=task)
    with pytest.raises(ValueError, match="task needs checkpoint, the folder"):
        shard_plan.run(X, W, task=(0, 2))
    assert not (tmp_path / "job").exists()


PROGRAM = """
import os, signal, sys
import numpy as np
from shardmap.planning.plan import plan
from tests.plan.run.checks import W, X, Recorded, columns

index, count, folder, killed = *map(int, sys.argv[1:3]), sys.argv[3], sys.argv[4]

class Killing(Recorded):
    def __getitem__(self, index):
        if len(self.reads) == 5 and killed == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

made = plan(columns, X, W, in_slices=({0: 8}, None))
result = made.run(Killing(X), W, checkpoint=folder, task=(index, count))
if result is not None:
    np.savez(folder + ".npz", *result)
"""


@pytest.mark.deep
def test_tasks_that_are_killed_are_started_again(shard_plan, tmp_path):
    def start(index, killed=""):
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"{index}", "2", tmp_path / "job", killed],
            cwd=pathlib.Path(__file__).parents[3],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    first, last = start(0), start(1, "killed")
    assert last.wait(timeout=300) == -signal.SIGKILL
    again = start(1)
    assert [first.wait(timeout=300), again.wait(timeout=300)] == [0, 0]
    with np.load(tmp_path / "job.npz") as got:
        for a, b in zip(got.values(), shard_plan.run(X, W), strict=True):
            np.testing.assert_array_equal(a, b)


def test_tasks_with_other_arguments_that_begin_at_once(tmp_path, monkeypatch):
    """Both find an empty folder; task 0 replaces the manifest of the other."""
    shard_plan = plan(lambda x, w: x * w, X, np.float32(2), in_slices=({0: 2}, None))
    looked, goes_on, fsync = threading.Event(), threading.Event(), os.fsync
    first = threading.Thread(
        target=shard_plan.run,
        args=(X, np.float32(3)),
        kwargs={"checkpoint": tmp_path, "task": (0, 2)},
    )

    def synced(file):
        if threading.current_thread() is first:
            looked.set()
            goes_on.wait(10)
        elif not looked.is_set():
            first.start()
            looked.wait(10)
        else:
            goes_on.set()
            first.join()
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(ValueError, match=r"was made with other values of args\[1\]"):
        shard_plan.run(X, np.float32(2), checkpoint=tmp_path, task=(1, 2))
