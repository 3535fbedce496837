"""Shards in other processes give the same bits."""

import pickle
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.cutting import cut_function
from shardmap.plan.plan import plan
from shardmap.plan.run.shards import Accumulator
from shardmap.plan.run.tasks import shard_tasks
from shardmap.plan.run.workers import ShardError
from tests.plan.plan_programs import reals

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


class Inline(Executor):
    """What another process would do, with what travels there and back."""

    def submit(self, function, /, *args):
        future = Future()
        try:
            result = function(*pickle.loads(pickle.dumps(args)))
            future.set_result(pickle.loads(pickle.dumps(result)))
        except Exception as error:
            future.set_exception(pickle.loads(pickle.dumps(error)))
        return future


class Blobs:
    """An executor of another process, as far as it can be seen from here."""

    def __init__(self):
        self.blobs = []

    def submit(self, function, blob, args, writes):
        assert all(type(arg) is np.ndarray for arg in args)
        assert writes == [None]
        self.blobs.append(blob)
        future = Future()
        future.set_result(function(blob, args, writes))
        return future


def test_other_processes_get_bytes_and_numpy_arrays(x):
    cut = cut_function(jnp.sin, (x,), ({0: 4},))
    acc, executor = Accumulator(cut), Blobs()
    work = Elsewhere(executor, cut, [x], acc)
    assert len(list(work.run(shard_tasks(cut.stages[0]), 2, 0, None))) == 4
    np.testing.assert_allclose(acc.result(), jax.jit(jnp.sin)(x), rtol=1e-6)
    assert len(executor.blobs) == 4
    # Shards that differ in their place only are one function.
    assert len(set(executor.blobs)) == 1


def mapped(tmp_path, x):
    found = np.memmap(tmp_path / "x", x.dtype, "w+", shape=x.shape)
    found[:] = x
    found.flush()
    return found


def moments(x):
    return x.sum(0), (x * 3).max(), x.T @ x


@pytest.fixture(scope="module")
def x():
    return reals(160, 8)


@pytest.mark.few(1)
@pytest.mark.parametrize("cuts", [{0: 80}, {0: 40, 1: 2}, {0: 16}])
def test_the_same_bits_as_here(x, cuts, tmp_path):
    made = plan(moments, x, in_slices=cuts)
    got = made.run(mapped(tmp_path, x), executor=Inline(), max_in_flight=1)
    for a, b in zip(got, made.run(x), strict=True):
        assert a.tobytes() == b.tobytes()


def test_what_cannot_be_read_here_is_tried_again(x):
    class Broken:
        shape, dtype = x.shape, x.dtype

        def __init__(self, left):
            self.left = left

        def __getitem__(self, index):
            if index[0].start == 40 and self.left:
                self.left -= 1
                raise OSError("the disk is gone")
            return x[index]

    made = plan(lambda x: x.sum(0), x, in_slices={0: 80})
    got = made.run(Broken(1), executor=Inline(), retries=1, max_in_flight=1)
    assert got.tobytes() == made.run(x).tobytes()
    with pytest.raises(ShardError, match="shard 20 of stage 0 failed 1 times"):
        made.run(Broken(2), executor=Inline(), max_in_flight=1)
