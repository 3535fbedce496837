"""Whatever becomes of a folder of results, a run gives the same bytes."""

import itertools
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.sources import registry
from shardmap.planning.sources.registry import register_shard_handler
from tests.plan.run.checks import Recorded, X, assert_bytes, flip, read_by_shards, zero

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def shard_plan():
    """A plan of two stages. Each result of a shard has 32 bytes, like a checksum."""

    def fun(x):
        scaled = (x - x.mean(0)[None]) / x.max(0)[None]
        return (scaled * scaled).sum(0), x[:, 0] * 2

    return plan(fun, X, in_slices={0: 8})


def one_run(shard_plan, x, folder, task=None):
    """The result, of which one array is in a file of its own."""
    file = f"{folder}{next(NUMBERS)}.npy"
    y = np.lib.format.open_memmap(file, "w+", X.dtype, (64,))
    result = shard_plan.run(x, checkpoint=folder, out=(None, y), task=task)
    return result and (result[0], np.load(file))


def two_tasks(shard_plan, x, folder):
    """The result of an array job."""
    with ThreadPoolExecutor(2) as pool:
        tasks = (0, 2), (1, 2)
        first, last = pool.map(lambda k: one_run(shard_plan, x, folder, task=k), tasks)
    assert first is None
    return last


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def behead(path):
    """Leaves the results without their checksums."""
    content = path.read_bytes()
    path.write_bytes(content[len(content) // 2 :])


def turn(path):
    """Puts the results, which may be as long as checksums, in place of these."""
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[half:] + content[:half])


def exchange(path):
    """By a file with results of the same shapes."""
    number = path.name.replace("-3.", "-4.")
    other = number if path.suffix == ".bin" else "*-0-0-0.fold"
    path.write_bytes(min(path.parent.glob(other)).read_bytes())


def made_of(path):
    """The files that are computed of one, and others."""
    for other in [*path.parent.iterdir()]:
        is_later = other.match("1-*.bin") and not path.match("1-*.bin")
        if other != path and (other.suffix == ".fold" or is_later):
            yield other


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("run", "name"),
    [
        *((one_run, "0-3.bin"), (one_run, "1-3.bin")),
        *((two_tasks, "0-3.bin"), (two_tasks, "1-3.bin")),
        # The combined maximum, which the second stage reads, and the second result.
        *((two_tasks, "*-1-0-0.fold"), (two_tasks, "*-0-0-0.fold")),
    ],
)
@pytest.mark.parametrize(
    "harm", [flip, zero, shorten, behead, turn, exchange, pathlib.Path.unlink]
)
def test_a_damaged_file_is_made_again(harm, run, name, shard_plan, tmp_path):
    folder = tmp_path / "done"
    want = run(shard_plan, X, folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = max(folder.glob(name))
    harm(path)
    x = Recorded(X)
    assert_bytes(run(shard_plan, x, folder), want)
    if run is one_run:
        assert [index[0].start for index in read_by_shards(x)] == [24]
    path.write_bytes(files[path.name])
    harm(path)
    for other in made_of(path):
        other.unlink()
    assert_bytes(run(shard_plan, X, folder), want)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


@pytest.mark.parametrize("run", [one_run, two_tasks])
@pytest.mark.parametrize("place", [0, 5])
def test_two_runs_in_one_folder(run, place, shard_plan, tmp_path, monkeypatch):
    """One runs from beginning to end while the other writes a file."""
    want, fsync = shard_plan.run(X), os.fsync
    nested, places = [], iter(range(place + 1))

    def synced(file):
        if next(places, None) == place:
            nested.append(run(shard_plan, X, tmp_path / "done"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    assert_bytes(run(shard_plan, X, tmp_path / "done"), want)
    assert_bytes(*nested, want)
    assert not list((tmp_path / "done").glob("*.part"))


class Store:
    shape, dtype = X.shape, X.dtype

    def __getitem__(self, index):
        return X[index]

    def __repr__(self):
        return "Store(token='sesame')"


@pytest.mark.parametrize("run", [one_run, two_tasks])
def test_no_option_of_a_store_is_written(run, shard_plan, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_openers", dict(registry._openers))
    register_shard_handler(
        Store,
        describe=lambda store: {"place": "s3", "options": {"token": "sesame"}},
        reopen=lambda said, writable: Store(),
    )
    run(shard_plan, Store(), tmp_path / "done")
    files = list((tmp_path / "done").iterdir())
    assert not [p for p in files if "sesame" in p.name or b"sesame" in p.read_bytes()]
