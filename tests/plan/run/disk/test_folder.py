"""Files are there in full or not at all."""

import errno
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardmap.planning.run.disk import folder
from shardmap.planning.run.disk.folder import ObjectStore
from shardmap.planning.run.workers import ShardError
from tests.plan.run.checks import Recorded, W, X, assert_bytes, read_by_shards


def test_a_file_is_no_folder(shard_plan, tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    for given in (path, path / "below"):
        with pytest.raises(ValueError, match=r"must be a folder, but .*file is a file"):
            shard_plan.run(X, W, checkpoint=given)
    assert path.read_text() == "mine"


@pytest.fixture
def store(monkeypatch):
    """An object store in memory, in which an object is whole."""
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    monkeypatch.setattr(memory, "store", {})
    return memory.store


def names(store):
    return {name.rpartition("/")[2] for name in store}


def test_a_folder_in_an_object_store(shard_plan, store, tmp_path):
    x = Recorded(X, failures=[(24, 2)])
    with pytest.raises(ShardError, match="the disk is gone"):
        shard_plan.run(x, W, checkpoint="memory://job/a", max_in_flight=1)
    assert names(store) == {"plan.json", *(f"0-{k}.bin" for k in range(8))} | {
        f"1-{k}.bin" for k in range(3)
    }
    again = Recorded(X)
    got = shard_plan.run(again, W, checkpoint="memory://job/a")
    assert len(read_by_shards(again)) == 16 - 11
    assert_bytes(got, shard_plan.run(X, W))
    with pytest.raises(ValueError, match=r"memory://job/a was made with other values"):
        shard_plan.run(X, W + 1, checkpoint="memory://job/a")
    with pytest.raises(ValueError, match="memory://job is not empty and no checkpoint"):
        shard_plan.run(X, W, checkpoint="memory://job")


def test_tasks_share_a_folder_in_an_object_store(shard_plan, store):
    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(
            lambda k: shard_plan.run(X, W, checkpoint="memory://job", task=(k, 2)),
            range(2),
        )
    assert first is None
    assert_bytes(last, shard_plan.run(X, W))
    assert [name for name in names(store) if name.endswith(".fold")]


def test_of_two_runs_that_begin_at_once_one_has_the_folder(
    shard_plan, store, monkeypatch
):
    """Where the store can put an object only if there is none of its name."""
    listed = ObjectStore.names

    def slow(folder):
        monkeypatch.undo()
        monkeypatch.setattr(type(folder._store), "store", store)
        before = listed(folder)
        shard_plan.run(X, W + 1, checkpoint="memory://job")
        return before

    want = shard_plan.run(X, W + 1)
    monkeypatch.setattr(ObjectStore, "names", slow)
    with pytest.raises(ValueError, match=r"made with other values of args\[1\]"):
        shard_plan.run(X, W, checkpoint="memory://job")
    assert_bytes(shard_plan.run(X, W + 1, checkpoint="memory://job"), want)


def test_a_store_that_takes_nothing_is_told(shard_plan, store, monkeypatch):
    def full(store, path, content, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(
        "fsspec.implementations.memory.MemoryFileSystem.pipe_file", full
    )
    with pytest.raises(OSError, match=r"cannot take .* of plan.json \(Access Denied\)"):
        shard_plan.run(X, W, checkpoint="memory://job")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match="needs fsspec, and its package for this"):
        shard_plan.run(X, W, checkpoint="memory://job")


def test_a_full_disk_is_told_and_leaves_no_draft(shard_plan, tmp_path, monkeypatch):
    synced = []

    def full(number):
        synced.append(number)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder.os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot take .* bytes of 0-1.bin \(No space"):
        shard_plan.run(X, W, checkpoint=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0.bin", "plan.json"]
