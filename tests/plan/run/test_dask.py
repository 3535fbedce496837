"""What the client of a cluster sends and gets."""

import jax.numpy as jnp
import pytest

from shardmap.plan.plan import plan
from tests.plan.plan_programs import reals
from tests.plan.run.test_engines import mapped

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


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
    made = plan(lambda x: jnp.tanh(x).sum(0), x, in_slices={0: pieces})
    got = made.run(x, executor=dask_client)
    assert 0 < sum(counted) < x.nbytes / 100
    assert got.tobytes() == made.run(x).tobytes()
