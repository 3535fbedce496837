"""A run that was stopped goes on from its checkpoint."""

import json
import pathlib
import runpy
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.run.disk.folder import Folder
from shardmap.planning.run.workers import ShardError
from tests import command_line
from tests.plan.run.checks import Recorded, W, X, assert_bytes, columns, read_by_shards


def test_a_checkpoint_goes_on_where_it_stopped(shard_plan, tmp_path):
    want = shard_plan.run(X, W)
    with pytest.raises(ShardError, match="the disk is gone"):
        shard_plan.run(
            Recorded(X, failures=[(24, 2)]), W, checkpoint=tmp_path, max_in_flight=1
        )
    x = Recorded(X)
    got = shard_plan.run(x, W, checkpoint=tmp_path)
    assert len(read_by_shards(x)) == 16 - 11
    assert_bytes(got, want)
    done = Recorded(X)
    shard_plan.run(done, W, checkpoint=tmp_path)
    assert read_by_shards(done) == []


def test_the_checkpoint_of_another_plan_is_refused(shard_plan, tmp_path):
    shard_plan.run(X, W, checkpoint=tmp_path)
    other = plan(columns, X, W, in_slices=({0: 4}, None))
    with pytest.raises(ValueError, match="belongs to another plan"):
        other.run(X, W, checkpoint=tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match="not empty and no checkpoint"):
        shard_plan.run(X, W, checkpoint=tmp_path)


def test_the_checkpoint_of_other_arguments_is_refused(shard_plan, tmp_path):
    shard_plan.run(X, W, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"made with other values of args\[1\]"):
        shard_plan.run(X, W + 1, checkpoint=tmp_path)
    key, other = jax.random.split(jax.random.key(0))
    noisy = plan(lambda key, x: x + jax.random.uniform(key), key, 2.0, in_slices={})
    noisy.run(key, 2.0, checkpoint=tmp_path / "noisy")
    with pytest.raises(ValueError, match=r"made with other values of args\[0\]"):
        noisy.run(other, 2.0, checkpoint=tmp_path / "noisy")
    with pytest.raises(ValueError, match=r"made with other values of args\[1\]"):
        noisy.run(key, 3.0, checkpoint=tmp_path / "noisy")


@pytest.mark.parametrize("dtype", ["float32", np.float32])
def test_arguments_of_equal_values_are_the_same(dtype, shard_plan, tmp_path):
    """As of a store, which names its dtype and its shape in a way of its own."""
    want = shard_plan.run(X, W, checkpoint=tmp_path)
    store = Recorded(X)
    store.dtype, store.shape = dtype, list(X.shape)
    assert_bytes(shard_plan.run(store, W, checkpoint=tmp_path), want)
    assert read_by_shards(store) == []


def test_a_damaged_folder_is_told(shard_plan, tmp_path):
    shard_plan.run(X, W, checkpoint=tmp_path)
    told = json.loads((tmp_path / "plan.json").read_text())
    others = [json.dumps(told | {"arguments": each}) for each in (None, 3)]
    without = [json.dumps({k: told[k] for k in told if k != key}) for key in told]
    texts = ("", "{", "[]", "null", '{"plan": 1}', "[" * 99_999)
    for content in (*texts, *others, *without):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(ValueError, match=r"plan.json of .* is damaged.*an empty f"):
            shard_plan.run(X, W, checkpoint=tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(told | {"arguments": []}))
    with pytest.raises(ValueError, match=rf"{tmp_path.name} belongs to another"):
        shard_plan.run(X, W, checkpoint=tmp_path)


def test_two_runs_of_other_values_begin_at_once(shard_plan, tmp_path, monkeypatch):
    """Neither takes a result of the other."""
    names = Folder.names

    def slow(folder):
        monkeypatch.undo()
        before = names(folder)
        shard_plan.run(X, W + 1, checkpoint=tmp_path)
        return before

    monkeypatch.setattr(Folder, "names", slow)
    got = shard_plan.run(X, W, checkpoint=tmp_path)
    assert_bytes(got, shard_plan.run(X, W))
    with pytest.raises(ValueError, match=r"made with other values of args\[1\]"):
        shard_plan.run(X, W + 1, checkpoint=tmp_path)


SLOW = """
import sys
from tests import command_line
from tests.plan.run.checks import W, X, Recorded, columns
from shardmap.planning.plan import plan

class Stopping(Recorded):
    def __getitem__(self, index):
        print("read", flush=True)
        if len(self.reads) >= 11:
            sys.stdin.readline()
        return super().__getitem__(index)

made = plan(columns, X, W, in_slices=({0: 8}, None))
out = np.lib.format.open_memmap(sys.argv[2], "w+", np.float32, (64, 4))
made.run(Stopping(X), W, checkpoint=sys.argv[1], out=(None, out))
"""


def test_an_interrupted_run_stops_and_goes_on(shard_plan, tmp_path):
    folder, out = tmp_path / "done", tmp_path / "out.npy"
    command = [sys.executable, "-c", "import numpy as np" + SLOW, folder, out]
    root = pathlib.Path(__file__).parents[4]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as process:
        for _ in range(12):  # In the second stage, which writes ``out``.
            assert process.stdout.readline() == "read\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=300)  # Which ends what it waits for.
    assert process.returncode != 0
    assert "KeyboardInterrupt" in told
    want = shard_plan.run(X, W)
    kept = len(list(folder.glob("*.bin")))
    assert 8 < kept < 16
    rows = 8 * (kept - 8 - 1)
    np.testing.assert_allclose(np.load(out)[:rows], want[1][:rows], rtol=1e-5)
    x = Recorded(X)
    got = shard_plan.run(x, W, checkpoint=folder)
    assert len(read_by_shards(x)) == 16 - kept
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


KILLED = """
import os, signal, sys
import jax.numpy as jnp
import numpy as np
import shardmap as sm

def spectrum(x):
    return jnp.sort(jnp.sort(x, 1), 0)

calls, fsync = [], os.fsync

def killing(file):
    calls.append(file)
    if len(calls) == 3:  # The manifest, the first shard, the second.
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

def main(checkpoint, scratch):
    x = np.arange(2.0**19, dtype=np.float32).reshape(512, 1024)
    made = sm.plan(spectrum, x, in_slices={0: 4}, scratch=scratch)
    made.run(x, checkpoint=checkpoint)

if __name__ == "__main__":
    os.fsync = killing
    main(*sys.argv[1:])
"""


@pytest.mark.deep
def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    folder, scratch = tmp_path / "done", tmp_path / "scratch"
    arguments = tmp_path / "killed.py", folder, scratch
    assert command_line.python(*arguments).returncode == -signal.SIGKILL
    assert len(list(scratch.glob("shardmap-*"))) == 1
    runpy.run_path(tmp_path / "killed.py")["main"](folder, scratch)
    assert list(scratch.glob("shardmap-*")) == []
