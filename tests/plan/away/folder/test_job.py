"""A saved plan gives the same bytes, whoever runs it, and says what is wrong."""

import json
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.arrays.sources import registry
from shardmap.plan.away.folder.claims import Claims
from shardmap.plan.away.folder.job import Job, JobError, sealed
from shardmap.plan.away.folder.work import Worker, results
from shardmap.plan.plan import plan
from shardmap.plan.run.disk.results import Folder
from tests.plan.plan_programs import reals

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")
X, W = reals(64, 8), reals(8, 4)


def score(x, w):
    mean = x.mean(0, keepdims=True)
    deviation = jnp.sqrt((x * x).mean(0, keepdims=True) - mean**2 + 1e-3)
    y = jnp.tanh((x - mean) / deviation @ w)
    return {"sum": y.sum(0), "rows": y, "same": x, "max": mean.max()}


@pytest.fixture
def x(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(64, 8))
    x[:] = X
    return x


@pytest.fixture
def made(x):
    return plan(score, x, W, in_slices=({0: 8}, None))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that every test has a copy of: its functions are compiled once."""
    folder = tmp_path_factory.mktemp("saved")
    x = np.memmap(folder / "x", np.float32, "w+", shape=X.shape)
    x[:] = X
    made = plan(score, x, W, in_slices=({0: 8}, None))
    made.save(folder / "job", x, W, tasks=3)
    return folder / "job"


@pytest.fixture
def path(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "job", symlinks=True)


def assert_made(path, want):
    found = results(Job(path))
    names = {f"result['{name}']": value for name, value in want.items()}
    assert found.keys() == names.keys()
    for name, value in names.items():
        got = np.load(path / found[name].where)
        assert got.tobytes() == np.asarray(value).tobytes()


def test_one_that_does_all_gives_the_same_bytes(path, made, x):
    Worker(Job(path)).run()
    assert_made(path, made.run(x, W))


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


def test_arguments_are_those_of_the_plan(made, x, tmp_path):
    made.save(tmp_path / "job")
    Worker(Job(tmp_path / "job")).run()
    assert_made(tmp_path / "job", made.run(x, W))


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


def test_sinks_of_the_user(made, x, tmp_path):
    zarr = pytest.importorskip("zarr", reason="writes the store")
    stores = [
        zarr.create_array(tmp_path / name, shape=(64, 4), chunks=(c, 4), dtype="f4")
        for name, c in (("fits", 8), ("shared", 12))
    ]
    total = np.lib.format.open_memmap(tmp_path / "sum.npy", "w+", np.float32, (4,))
    want = made.run(x, W)
    for k, store in enumerate(stores):
        job = tmp_path / f"job{k}"
        out = {"max": None, "rows": store, "same": None, "sum": total}
        made.save(job, x, W, out=out)
        Worker(Job(job)).run()
        assert store[:].tobytes() == want["rows"].tobytes()
        assert total.tobytes() == want["sum"].tobytes()
        assert Worker(Job(job)).check() == 0


def test_keys_constants_and_halves(tmp_path):
    table = np.arange(64, dtype=np.float32).reshape(8, 8)

    def fun(key, x):
        half = x.astype(jnp.bfloat16)
        noise = jax.random.uniform(key, x.shape)
        return half, (x + noise + table).sum(0), jax.random.fold_in(key, 1), 3.0

    key = jax.random.key(1)
    made = plan(fun, key, X[:8], in_slices=(None, {0: 4}))
    want = made.run(key, X[:8])
    made.save(tmp_path, key, X[:8])
    job = Job(tmp_path)
    Worker(job).run()
    assert np.load(tmp_path / "out/0.npy").tobytes() == want[0].tobytes()
    assert np.load(tmp_path / "out/1.npy").tobytes() == want[1].tobytes()
    data = np.asarray(jax.random.key_data(want[2]))
    assert np.load(tmp_path / "out/2.npy").tobytes() == data.tobytes()
    assert np.load(tmp_path / "out/3.npy") == 3.0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_types_that_numpy_does_not_know(name, tmp_path):
    dtype = np.dtype(name)
    x = np.arange(-4, 4).astype(dtype).reshape(4, 2)
    lying = np.memmap(tmp_path / "x", dtype, "w+", shape=x.shape)
    lying[:] = x
    y = np.memmap(tmp_path / "y", dtype, "w+", shape=x.shape)

    def fun(x, z):
        return x + z, x.max(0), x.max(), dtype.type(1)

    made = plan(fun, lying, x, in_slices={0: 2})
    want = made.run(lying, x)
    for job, out in (("kept", None), ("put", (y, None, None, None))):
        made.save(tmp_path / job, lying, x, out=out)
        Worker(Job(tmp_path / job)).run()
        assert Worker(Job(tmp_path / job)).check() == 0
        for k, value in enumerate(want[out is not None :], out is not None):
            stored = np.load(tmp_path / job / f"out/{k}.npy")
            assert stored.dtype == np.dtype(f"u{dtype.itemsize}")
            np.testing.assert_array_equal(stored.view(dtype), value)
        told = [each.dtype for each in results(Job(tmp_path / job)).values()]
        assert told == [dtype] * 4
    np.testing.assert_array_equal(y, want[0])


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def link(path):
    """The same content, which another user may change after it was checked."""
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("harm", [damage, shorten, os.remove, link])
@pytest.mark.parametrize(
    "name", ["functions/0.bin", "tables/0-1.jsonl", "inputs/1.npy", "job.json"]
)
def test_what_was_tampered_with_is_not_run(name, harm, path):
    harm(path / name)
    match = r"is missing or damaged|is damaged|is no job|is no plain file"
    with pytest.raises(ValueError, match=match):
        Worker(Job(path)).run()


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


def test_other_versions_are_told(path):
    job = json.loads((path / "job.json").read_text())
    for change, match in (
        ({"format": 99}, r"written by shardmap .*, jax .* in format 99, .* reads 3"),
        ({"calling_convention": 99}, r"calling convention 99; JAX .* runs \d+ to"),
        ({"platforms": ["tpu"]}, r"written for \['tpu'\], but this process has cpu"),
    ):
        (path / "job.json").write_bytes(sealed(job["body"] | change))
        with pytest.raises(JobError, match=match):
            Worker(Job(path)).run()


def test_kinds_that_are_not_registered_are_told(path, monkeypatch):
    monkeypatch.setattr(registry, "_kinds", {})
    with pytest.raises(JobError, match="nothing is registered for memmap: import"):
        Worker(Job(path)).run()


def test_what_cannot_be_saved(made, x, tmp_path):
    made.save(tmp_path / "job", x, W)
    with pytest.raises(ValueError, match="is a job already: give an empty folder"):
        made.save(tmp_path / "job", x, W)
    with pytest.raises(ValueError, match=r"tasks must be at least 1, got 0"):
        made.save(tmp_path / "other", x, W, tasks=0)
    out = {"max": None, "rows": np.zeros((64, 4), "f4"), "same": None, "sum": None}
    with pytest.raises(ValueError, match=r"result\['rows'\] .* is a ndarray that they"):
        made.save(tmp_path / "other", x, W, out=out)
    twice = plan(lambda x: x * 2, x, in_slices={0: 4})
    with pytest.raises(ValueError, match=r"cannot write result over what is read"):
        twice.save(tmp_path / "other", x, out=x)
    with pytest.raises(JobError, match=r"other is no job: made.save"):
        Job(tmp_path / "other")


def test_claims_of_the_living_stand_and_of_the_dead_do_not(tmp_path):
    folder = Folder(tmp_path, "claims")
    one, other = Claims(folder), Claims(folder)
    with one.claimed("0-0") as mine, other.claimed("0-0") as theirs:
        assert (mine, theirs) == (True, False)
        assert other.live("0-0")
    assert not other.live("0-0")
    who = {"host": os.uname().nodename, "pid": 2**22 + 1, "token": "x"}
    (tmp_path / "0-1.claim").write_text(json.dumps(who))
    with one.claimed("0-1") as mine:
        assert mine
    (tmp_path / "0-2.claim").write_text(json.dumps({**who, "host": "elsewhere"}))
    with one.claimed("0-2") as mine:
        assert not mine
    os.utime(tmp_path / "0-2.claim", (0, 0))
    with one.claimed("0-2") as mine:
        assert mine
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_renewed(tmp_path):
    claims = Claims(Folder(tmp_path, "claims"), lease=0.2)
    with claims.claimed("0-0"):
        os.utime(tmp_path / "0-0.claim", (0, 0))
        for _ in range(200):
            if (tmp_path / "0-0.claim").stat().st_mtime > 0:
                break
            time.sleep(0.02)
        assert Claims(Folder(tmp_path, "claims"), lease=5).live("0-0")
