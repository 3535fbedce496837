"""The results of a plan as arrays of Dask, and what a cluster moves."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.extend import register_shard_handler
from shardmap.planning.plan import plan
from shardmap.planning.run import dask
from shardmap.planning.sources import registry
from tests.command_line import ROOT
from tests.plan.plan_programs import reals
from tests.plan.run.test_engines import W, X, assert_bytes, mapped, score


def test_arrays_of_dask_come_out(tmp_path):
    da = pytest.importorskip("dask.array", reason="the result under test")
    shard_plan = plan(score, X, W, in_slices=({0: 8}, None))
    want = shard_plan.run(X, W)
    for x in (mapped(tmp_path), da.from_array(X, chunks=(24, 5))):
        got = shard_plan.to_dask(x, W)
        assert [each.shape for each in got] == [np.shape(each) for each in want]
        assert_bytes([each.compute(scheduler="sync") for each in got], want)
    got = shard_plan.to_dask()
    assert_bytes([each.compute(scheduler="sync") for each in got], want)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="Dask has no random keys"):
        plan(lambda key: key, key, in_slices={}).to_dask(key)


@pytest.mark.usefixtures("young_heap")
def test_the_dashboard_has_the_stages_by_name():
    pytest.importorskip("dask.array", reason="has the graph")
    shard_plan = plan(lambda x: x - x.mean(0)[None], X, in_slices={0: 8})
    layers = shard_plan.to_dask().dask.layers
    names = {name.rpartition("-")[0] for name in layers}
    assert {"shards-0", "folds-0", "shards-1"} <= names


def test_arguments_that_are_gone_are_asked_for():
    shard_plan = plan(
        lambda x, by: x * by, np.ones((8, 2), np.float32), 2.0, in_slices={}
    )
    gc.collect()
    with pytest.raises(ValueError, match="shapes only, or are gone: pass them ag"):
        shard_plan.to_dask()


@pytest.fixture
def counted(dask_client):
    """The bytes that the client sends and gets."""
    tcp = pytest.importorskip("distributed.comm.tcp")
    moved = []
    write, read = tcp.TCP.write, tcp.read_bytes_rw
    # The scheduler runs here too: only what the client's own connection moves counts.
    own = dask_client.scheduler_comm.comm

    async def counted_write(self, *args, **options):
        count = await write(self, *args, **options)
        if self is own:
            moved.append(count or 0)
        return count

    async def counted_read(stream, count):
        if stream is own.stream:
            moved.append(count)
        return await read(stream, count)

    tcp.TCP.write, tcp.read_bytes_rw = counted_write, counted_read
    yield moved
    tcp.TCP.write, tcp.read_bytes_rw = write, read


@pytest.mark.deep
@pytest.mark.parametrize(("pieces", "width"), [(32, 256), (64, 1)])
def test_map_reduce_sends_little(pieces, width, tmp_path, dask_client, counted):
    """To sums over a file, in shards of 0.5 and 0.25 MB."""
    x = mapped(tmp_path, reals(2**22 // width, width))
    shard_plan = plan(lambda x: jnp.tanh(x).sum(0), x, in_slices={0: pieces})
    got = shard_plan.run(x, executor=dask_client)
    assert 0 < sum(counted) < x.nbytes / 100
    assert got.tobytes() == shard_plan.run(x).tobytes()


class Slow:
    """An array whose reads take a while."""

    shape, dtype = (96, 1100), np.dtype(np.float32)

    def __getitem__(self, index):
        time.sleep(0.02)
        rows, columns = index
        return np.ones((rows.stop - rows.start, columns.stop - columns.start), "f")


def slow_again(about, writable):
    return Slow()


@pytest.mark.deep
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_worker_that_is_lost_costs_time_alone(checkpoint, monkeypatch, tmp_path):
    """At random times, with a large array that one worker may be the only to hold."""
    distributed = pytest.importorskip("distributed", reason="the cluster under test")
    monkeypatch.setattr(registry, "_openers", dict(registry._openers))
    register_shard_handler(Slow, describe=lambda _: {}, reopen=slow_again)
    w = np.eye(1100, dtype=np.float32)
    shard_plan = plan(lambda x, w: (x @ w).sum(0), Slow(), w, in_slices=({0: 48}, None))
    random = np.random.default_rng(0)
    # Not by nannies: one whose worker does not start in time gives it up for good.
    start = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-nanny"]
    start += ["--nthreads=1", "--no-dashboard"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        contextlib.ExitStack() as stack,
        distributed.LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        workers: list[subprocess.Popen] = []
        for k in range(10):
            while len(workers) < 2:
                worker = subprocess.Popen(
                    [*start, cluster.scheduler_address],
                    env=environment,
                    stderr=subprocess.DEVNULL,
                )
                workers.append(stack.enter_context(worker))
                stack.callback(worker.kill)
            client.wait_for_workers(2, timeout=120)
            lost = workers.pop(k % 2)
            after = threading.Timer(random.uniform(0, 1.5), lost.kill)
            after.start()
            folder = tmp_path / str(k) if checkpoint else None
            got = shard_plan.run(Slow(), w, executor=client, checkpoint=folder)
            after.join()
            np.testing.assert_array_equal(got, np.full(1100, 96, np.float32))
            lost.wait(60)
            while len(cluster.scheduler_info["workers"]) > 1:
                time.sleep(0.01)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_only_the_result_comes_to_the_client(checkpoint, dask_client, tmp_path):
    """Not what a stage keeps for the next, nor what is kept in a folder."""
    distributed = pytest.importorskip("distributed", reason="the cluster under test")
    came = []

    def result(future):
        came.append(received(future))
        return came[-1]

    received = distributed.Future.result
    x = reals(64, 64)
    shard_plan = plan(lambda x: jnp.abs(jnp.fft.fft2(x)).sum(), x, in_slices={0: 8})
    assert len(shard_plan.stages) > 1
    folder = tmp_path / "kept" if checkpoint else None
    with mock.patch.object(distributed.Future, "result", result):
        got = shard_plan.run(x, executor=dask_client, checkpoint=folder)
    assert got.tobytes() == shard_plan.run(x).tobytes()
    assert sum(part.nbytes for parts in came for part in parts) == got.nbytes
    if checkpoint:
        assert list(folder.glob("0-*.bin"))


def test_a_later_stage_gets_parts_of_large_blocks(dask_client, monkeypatch):
    monkeypatch.setattr(dask, "AT_ONCE", 100)
    x = reals(24, 16)
    shard_plan = plan(lambda x: jnp.sort(jnp.sort(x, 1), 0), x, in_slices={0: 3, 1: 4})
    assert len(shard_plan.stages) == 2
    want = np.sort(np.sort(x, 1), 0)
    np.testing.assert_array_equal(shard_plan.run(x, executor=dask_client), want)
    lazy = shard_plan.to_dask(x)
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), want)
    layers, needed = lazy.dask.layers, lazy.dask.dependencies
    [shards] = [name for name in layers if name.startswith("shards-1")]
    names = {name.partition("-")[0] for name in needed[shards]}
    assert names == {"function", "parts"}
    pieces = shard_plan.stages[1].num_shards
    [parts] = [name for name in layers if name.startswith("parts")]
    assert len(layers[parts]) == pieces * shard_plan.stages[0].num_shards


@pytest.mark.deep
def test_many_small_shards_are_few_tasks(dask_client):
    x = reals(4000)
    shard_plan = plan(lambda x: 2 * x, x, in_slices={0: 4000})
    got = shard_plan.run(x, executor=dask_client)
    np.testing.assert_array_equal(got, 2 * x)
    lazy = shard_plan.to_dask(x)
    shards = [key for key in lazy.dask if str(key[0]).startswith("shards-0")]
    assert len(shards) == 1000


def test_progress_is_that_of_the_cluster(dask_client, capfd):
    x = reals(64, 4)
    shard_plan = plan(lambda x: x - x.mean(0, keepdims=True), x, in_slices={0: 8})
    shard_plan.run(x, executor=dask_client, progress=True)
    assert "100% Completed" in capfd.readouterr().out


def test_a_client_and_an_array_job_are_two_ways(dask_client, tmp_path):
    shard_plan = plan(score, X, W, in_slices=({0: 8}, None))
    with pytest.raises(ValueError, match="a Dask client over its workers: give one"):
        shard_plan.run(X, W, executor=dask_client, task=(0, 2), checkpoint=tmp_path)
