"""Tasks in any order and number give the same bytes; what is damaged is made again."""

import numpy as np
import pytest

from shardmap.commands import work
from shardmap.plan.away.folder.job import Job
from shardmap.plan.away.folder.work import Worker, results
from shardmap.plan.plan import plan
from tests import command_line
from tests.plan.away.folder.checks import W, assert_made, damage, shorten

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


def test_one_that_does_all_gives_the_same_bytes(path, made, x):
    Worker(Job(path)).run()
    assert_made(path, made.run(x, W))


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1,)])
def test_tasks_in_any_order_give_the_same_bytes(order, path, made, x):
    for task in order:
        Worker(Job(path)).run(task)
    Worker(Job(path)).run()
    assert_made(path, made.run(x, W))


def test_other_numbers_of_tasks(path, made, x):
    for task in range(5):
        Worker(Job(path)).run(task, of=5)
    first, last = Worker(Job(path)).status()
    assert (first.shards, first.units, first.done, first.over) == (8, 3, 3, True)
    assert (last.done, last.claimed, last.over) == (3, 0, False)


def test_what_is_done_is_not_run_again(path, monkeypatch):
    Worker(Job(path)).run()
    monkeypatch.setattr(Job, "run", None)
    for mark in (path / "done").iterdir():
        mark.unlink()
    Worker(Job(path)).run()
    assert [stage.done for stage in Worker(Job(path)).status()] == [3, 3]


def test_a_checkpoint_is_the_same(path, made, x, monkeypatch):
    """What a run keeps is found by tasks, if none of it is written elsewhere."""
    total = plan(lambda x: x.sum(0), x, in_slices={0: 8})
    folder = path.parent / "sum"
    want = total.run(x, checkpoint=folder)
    total.save(folder, x)
    monkeypatch.setattr(Job, "run", None)
    Worker(Job(folder)).run()
    assert np.load(folder / "out/0.npy").tobytes() == want.tobytes()


def test_a_result_as_long_as_a_checksum_is_not_taken_for_one(tmp_path):
    """A run keeps its results in the folder, a task the checksums of what it wrote."""
    x = np.arange(1, 17, dtype=np.float32)
    double = plan(lambda x: x * 2, x, in_slices={0: 2})  # Each shard gives 32 bytes.
    double.run(x, checkpoint=tmp_path)
    double.save(tmp_path, x)
    assert command_line.call(work.main, str(tmp_path)).returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out/0.npy"), x * 2)
    np.testing.assert_array_equal(double.run(x, checkpoint=tmp_path), x * 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("harm", [damage, shorten])
@pytest.mark.parametrize("name", ["0-3.bin", "1-5.bin"])
def test_damaged_results_are_made_again(name, harm, path, made, x):
    Worker(Job(path)).run()
    harm(path / name)
    assert Worker(Job(path)).check() == 1
    Worker(Job(path)).run()
    assert_made(path, made.run(x, W))


def test_a_damaged_output_is_found(path, made, x):
    Worker(Job(path)).run()
    rows = np.load(path / "out/1.npy", mmap_mode="r+")
    again = results(Job(path))["result['rows']"].where
    rows = np.load(path / again, mmap_mode="r+")
    rows[20] += 1
    rows.flush()
    assert Worker(Job(path)).check() == 1
    Worker(Job(path)).run()
    assert Worker(Job(path)).check() == 0
    assert_made(path, made.run(x, W))
