"""Files are there in full or not at all."""

import errno
import os

import pytest

from shardmap.planning.run.disk import folder
from tests.plan.run.checks import W, X


def test_a_file_is_no_folder(shard_plan, tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    for given in (path, path / "below"):
        with pytest.raises(ValueError, match=r"must be a folder, but .*file is a file"):
            shard_plan.run(X, W, checkpoint=given)
    assert path.read_text() == "mine"


def test_links_are_not_followed(shard_plan, tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    folder = tmp_path / "done"
    shard_plan.run(X, W, checkpoint=folder)
    (folder / "0-3.bin").unlink()
    (folder / "0-3.bin").symlink_to(other)
    with pytest.raises(ValueError, match=r"0-3.bin is no plain file"):
        shard_plan.run(X, W, checkpoint=folder)
    assert other.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["plan.json", "0-3.bin"])
def test_a_pipe_is_refused_and_not_waited_for(name, shard_plan, tmp_path):
    shard_plan.run(X, W, checkpoint=tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is no plain file"):
        shard_plan.run(X, W, checkpoint=tmp_path)


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
