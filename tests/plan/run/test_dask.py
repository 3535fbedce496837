"""The results of a plan as arrays of Dask, and what a cluster moves."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.planning.plan import plan
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
