"""What later stages need is kept in a folder, and is gone in the end."""

import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.run import cut_program
from shardmap.planning.run.disk import scratch
from shardmap.planning.run.workers import ShardError
from tests.plan.checks import assert_same
from tests.plan.plan_programs import reals
from tests.plan.run.checks import Recorded

X = reals(48, 40)
KEPT = 48 * 40 * 4


def spectrum(x):
    """Rows, then columns: the rows' result is kept, and cut along the other axis."""
    return jnp.sort(jnp.sort(x, 1) + x[::-1], 0) * 2


@pytest.fixture(autouse=True)
def _small_values_too(monkeypatch):
    monkeypatch.setattr(cut_program, "IN_MEMORY", 100)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "below" / "scratch"


def content(place):
    return sorted(os.listdir(place)) if place.exists() else []


class Watched(Recorded):
    """Notes what is in a place whenever it is read."""

    def __init__(self, array, place, **options):
        super().__init__(array, **options)
        self.place, self.seen = place, []

    def __getitem__(self, index):
        self.seen.append(content(self.place))
        return super().__getitem__(index)


def test_what_is_kept_lies_there_until_the_run_ends(place):
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    assert len(shard_plan.stages) == 2
    x = Watched(X, place)
    got = shard_plan.run(x, scratch=place)
    assert_same(got, jax.jit(spectrum)(X))
    assert all(len(names) == 1 for names in x.seen)
    assert x.seen[0][0].startswith("shardmap-")
    assert content(place) == []


@pytest.mark.deep
def test_every_way_to_run_reads_it_there(place):
    shard_plan = plan(spectrum, X, in_slices=({0: 4},), scratch=place)
    with ThreadPoolExecutor(2) as pool:
        assert_same(shard_plan.run(X, executor=pool), jax.jit(spectrum)(X))
    pytest.importorskip("flatbuffers")
    assert_same(shard_plan.run(X, executor=1), jax.jit(spectrum)(X))
    assert content(place) == []


def test_parts_are_put_together_there(place):
    def fun(x):
        return jnp.tanh(x.T @ x)[:, ::-1]

    shard_plan = plan(fun, X, in_slices=({0: 4},))
    assert len(shard_plan.stages) == 2
    assert_same(shard_plan.run(X, scratch=place), jax.jit(fun)(X), 1e-4)


@pytest.mark.deep
def test_types_that_numpy_does_not_know(place):
    x = X.astype(ml_dtypes.bfloat16)
    shard_plan = plan(spectrum, x, in_slices=({0: 4},))
    assert_same(shard_plan.run(x, scratch=place), jax.jit(spectrum)(x))
    pytest.importorskip("flatbuffers")
    assert_same(shard_plan.run(x, scratch=place, executor=1), jax.jit(spectrum)(x))


def test_random_keys_are_kept_as_their_bits(place):
    def fun(x):
        keys = jax.random.split(jax.random.key(3), 64)
        return jax.random.uniform(keys[jnp.argsort(x[:, 0])[3]]) + x

    shard_plan = plan(fun, X, in_slices=({0: 4},))
    assert_same(shard_plan.run(X, scratch=place), jax.jit(fun)(X), 1e-6)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_stays_of_a_run_that_ends_early(place, error):
    class Ends(Watched):
        def __getitem__(self, index):
            if len(self.seen) == 3:
                raise error("the end")
            return super().__getitem__(index)

    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    x = Ends(X, place)
    with pytest.raises(ShardError if error is OSError else error, match="the end"):
        shard_plan.run(x, scratch=place)
    assert len(x.seen[-1]) == 1
    assert content(place) == []


def test_a_run_goes_on_from_its_checkpoint(place, tmp_path):
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    done = tmp_path / "done"
    # The second and the third shard read the same rows.
    with pytest.raises(ShardError, match="the disk is gone"):
        shard_plan.run(
            Recorded(X, failures=[(12, 2)]),
            checkpoint=done,
            scratch=place,
            max_in_flight=1,
        )
    got = shard_plan.run(X, checkpoint=done, scratch=place)
    assert got.tobytes() == shard_plan.run(X).tobytes()


def test_a_plan_says_what_is_kept_where(tmp_path):
    bare = plan(spectrum, X, in_slices=({0: 4},))
    shard_plan = plan(spectrum, X, in_slices=({0: 4},), scratch=tmp_path / "fast")
    assert bare.peak_bytes == shard_plan.peak_bytes + KEPT
    for told in (str(shard_plan), str(shard_plan.explain())):
        assert f"scratch {tmp_path / 'fast'}: 7.5 KiB at most" in told
        assert told.count("7.5 KiB kept in scratch") == 2
    assert [cost.scratch_bytes for cost in shard_plan.stage_costs] == [KEPT, KEPT]
    assert [cost.kept_bytes for cost in shard_plan.stage_costs] == [0, 0]
    assert "kept in scratch" not in str(bare.explain())
    assert not (tmp_path / "fast").exists()
    shard_plan.run(X)
    assert content(tmp_path / "fast") == []


def test_memory_bounds_what_is_not_in_scratch(tmp_path):
    with pytest.raises(ValueError, match=r"memory=6\.8 KiB is too little"):
        plan(spectrum, X, memory=7000)
    shard_plan = plan(spectrum, X, memory=7000, scratch=tmp_path)
    assert shard_plan.peak_bytes <= 7000
    assert_same(shard_plan.run(X), jax.jit(spectrum)(X))


def test_small_values_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(cut_program, "IN_MEMORY", KEPT)
    shard_plan = plan(spectrum, X, in_slices=({0: 4},), scratch=tmp_path)
    x = Watched(X, tmp_path)
    shard_plan.run(x)
    assert not any(x.seen)
    assert "7.5 KiB kept" in str(shard_plan)
    assert "kept in scratch" not in str(shard_plan)


def test_what_is_not_needed_any_more_is_removed(tmp_path):
    def fun(x):
        return jnp.sort(jnp.sort(jnp.sort(x, 1), 0), 1) + x

    shard_plan = plan(fun, X, in_slices=({0: 4},), scratch=tmp_path)
    assert len(shard_plan.stages) == 3
    seen = []

    class Files(Recorded):
        def __getitem__(self, index):
            [folder] = tmp_path.iterdir()
            seen.append(len(os.listdir(folder)))
            return super().__getitem__(index)

    assert_same(shard_plan.run(Files(X)), jax.jit(fun)(X))
    assert (seen[0], seen[-1]) == (2, 1)


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_the_next_run_removes_what_one_has_left(how, place, monkeypatch):
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    removed = shutil.rmtree

    def interrupted(*args, **options):
        monkeypatch.setattr(shutil, "rmtree", removed)
        raise KeyboardInterrupt("while it is removed")

    if how == "killed":
        (place / "shardmap-scratch-abc").mkdir(parents=True)
    else:
        monkeypatch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt, match="while it is removed"):
            shard_plan.run(X, scratch=place)
    assert len(content(place)) == 1
    shard_plan.run(X, scratch=place)
    assert content(place) == []


def test_runs_at_the_same_time_leave_the_folders_of_each_other(place):
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))

    class Nested(Watched):
        def __getitem__(self, index):
            shard_plan.run(X, scratch=place)
            return super().__getitem__(index)

    x = Nested(X, place)
    assert_same(shard_plan.run(x, scratch=place), jax.jit(spectrum)(X))
    assert all(len(names) == 1 for names in x.seen)


def test_an_address_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    with pytest.raises(ValueError, match="scratch must be a folder on a disk, got 's3"):
        shard_plan.run(X, scratch="s3://bucket/job")
    assert content(tmp_path) == []


def test_a_link_is_not_followed(tmp_path):
    other = tmp_path / "other"
    (other / "mine").mkdir(parents=True)
    (tmp_path / "shardmap-0").symlink_to(other)
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    shard_plan.run(X, scratch=tmp_path)
    assert os.listdir(other) == ["mine"]
    assert (tmp_path / "shardmap-0").is_symlink()


def test_a_full_disk_is_told_before_anything_is_read(tmp_path, monkeypatch):
    def full(file, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch.os, "posix_fallocate", full)
    x = Recorded(X)
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    with pytest.raises(OSError, match=r"cannot take 7\.5 KiB of float32\[48, 40\]"):
        shard_plan.run(x, scratch=tmp_path)
    assert x.reads == []
    assert os.listdir(tmp_path) == []


def test_a_place_that_is_none_is_refused(tmp_path):
    shard_plan = plan(spectrum, X, in_slices=({0: 4},))
    for call in (
        lambda: plan(spectrum, X, scratch=3),
        lambda: shard_plan.run(X, scratch=3),
    ):
        with pytest.raises(TypeError, match="the path of a folder, got 3"):
            call()
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"scratch must be a folder, but .* is a file"):
        shard_plan.run(X, scratch=path)
