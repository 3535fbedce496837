"""A run that was stopped goes on from its checkpoint."""

import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from shardmap.plan.plan import plan
from shardmap.plan.run.run import ShardError
from tests.plan.run.checks import Recorded, W, X, columns


def test_a_checkpoint_goes_on_where_it_stopped(made, tmp_path):
    want = made.run(X, W)
    with pytest.raises(ShardError, match="the disk is gone"):
        made.run(
            Recorded(X, failures=[(24, 2)]), W, checkpoint=tmp_path, max_in_flight=1
        )
    x = Recorded(X)
    got = made.run(x, W, checkpoint=tmp_path)
    assert len(x.reads) == 16 - 11
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()
    done = Recorded(X)
    made.run(done, W, checkpoint=tmp_path)
    assert done.reads == []


def test_a_half_written_shard_is_not_done(made, tmp_path):
    want = made.run(X, W, checkpoint=tmp_path)
    path = tmp_path / "0-3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    pathlib.Path(tmp_path / "0-4.part").write_bytes(b"half")
    x = Recorded(X)
    got = made.run(x, W, checkpoint=tmp_path)
    assert len(x.reads) == 1
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_checkpoint_of_another_plan_is_refused(made, tmp_path):
    made.run(X, W, checkpoint=tmp_path)
    other = plan(columns, X, W, in_slices=({0: 4}, None))
    with pytest.raises(ValueError, match="belongs to another plan"):
        other.run(X, W, checkpoint=tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ValueError, match="not empty and no checkpoint"):
        made.run(X, W, checkpoint=tmp_path)


def test_the_checkpoint_of_other_arguments_is_refused(made, tmp_path):
    made.run(X, W, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"made with other values of args\[1\]"):
        made.run(X, W + 1, checkpoint=tmp_path)
    key, other = jax.random.split(jax.random.key(0))
    noisy = plan(lambda key, x: x + jax.random.uniform(key), key, 2.0)
    noisy.run(key, 2.0, checkpoint=tmp_path / "noisy")
    with pytest.raises(ValueError, match=r"made with other values of args\[0\]"):
        noisy.run(other, 2.0, checkpoint=tmp_path / "noisy")
    with pytest.raises(ValueError, match=r"made with other values of args\[1\]"):
        noisy.run(key, 3.0, checkpoint=tmp_path / "noisy")


SLOW = """
import sys, time
from tests.plan.run.checks import W, X, Recorded, columns
from shardmap.plan.plan import plan

class Slow(Recorded):
    def __getitem__(self, index):
        print("read", flush=True)
        time.sleep(0.1)
        return super().__getitem__(index)

made = plan(columns, X, W, in_slices=({0: 8}, None))
out = np.lib.format.open_memmap(sys.argv[2], "w+", np.float32, (64, 4))
made.run(Slow(X), W, checkpoint=sys.argv[1], out=(None, out))
"""


def test_an_interrupted_run_stops_and_goes_on(made, tmp_path):
    folder, out = tmp_path / "done", tmp_path / "out.npy"
    command = [sys.executable, "-c", "import numpy as np" + SLOW, folder, out]
    root = pathlib.Path(__file__).parents[3]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    ) as process:
        for _ in range(12):  # In the second stage, which writes ``out``.
            assert process.stdout.readline() == "read\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in told
    want = made.run(X, W)
    kept = len(list(folder.glob("*.bin")))
    assert 8 < kept < 16
    rows = 8 * (kept - 8 - 1)
    np.testing.assert_allclose(np.load(out)[:rows], want[1][:rows], rtol=1e-5)
    x = Recorded(X)
    got = made.run(x, W, checkpoint=folder)
    assert len(x.reads) == 16 - kept
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
