"""Shards in other processes, alone and in groups, give the same bits."""

import pickle
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.away import groups as groups_module
from shardmap.plan.away import processes
from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.away.tasks import run_task
from shardmap.plan.cutting import cut_function
from shardmap.plan.plan import plan
from shardmap.plan.run.shards import Accumulator, Shards
from shardmap.plan.run.workers import ShardError
from tests.plan.plan_programs import reals

pytest.importorskip("flatbuffers", reason="jax.export writes its bytes with it")


class Inline(Executor):
    """What another process would do, and the bytes that come back from it."""

    def __init__(self):
        self.calls, self.came = [], 0

    def submit(self, function, /, *args):
        future = Future()
        self.calls.append(function.__name__)
        try:
            result = function(*pickle.loads(pickle.dumps(args)))
            self.came += len(pickle.dumps(result))
            future.set_result(result)
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
    work = Elsewhere(cut, [x], acc, executor)
    assert len(list(work.run_stage(Shards(cut, cut.stages), 2, 0, None))) == 4
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
def test_the_same_bits_as_one_by_one(x, cuts, tmp_path):
    made, executor = plan(moments, x, in_slices=cuts), Inline()
    got = made.run(mapped(tmp_path, x), executor=executor, max_in_flight=1)
    for a, b in zip(got, made.run(x), strict=True):
        assert a.tobytes() == b.tobytes()
    if made.num_shards > 32:
        assert set(executor.calls) == {"run_group"}
        assert len(executor.calls) < made.num_shards / 8


def test_what_comes_back_is_little(x, tmp_path):
    made = plan(lambda x: x.T @ x, x, in_slices={0: 160})
    executor = Inline()
    made.run(mapped(tmp_path, x), executor=executor, max_in_flight=1)
    assert executor.came < 160 * 8 * 8 * 4 / 5


def test_arguments_in_memory_are_sent_once_for_a_group(x):
    def fun(x, w):
        return (x @ w).sum(0)

    w = reals(8, 8)
    made, executor = plan(fun, x, w, in_slices=({0: 160}, None)), Inline()
    got = made.run(x, w, executor=executor, max_in_flight=1)
    assert got.tobytes() == made.run(x, w).tobytes()
    assert set(executor.calls) == {"run_group"}


def test_much_that_is_sent_or_comes_back_goes_alone(x, monkeypatch):
    monkeypatch.setattr(processes, "SENT", 100)
    made, executor = plan(lambda x: (x.sum(0), x + 1), x, in_slices={0: 80}), Inline()
    got = made.run(x, executor=executor, max_in_flight=1)
    assert got[1].tobytes() == made.run(x)[1].tobytes()
    assert executor.calls == ["run_task"] * 80


def test_a_shard_of_a_group_is_tried_again_there(x, tmp_path, monkeypatch):
    made = plan(lambda x: x.sum(0), x, in_slices={0: 80})
    fails = iter([False, True, False, True, True, *[False] * 200])
    monkeypatch.setattr(groups_module, "run_task", _failing(fails))
    got = made.run(mapped(tmp_path, x), executor=Inline(), retries=2, max_in_flight=1)
    assert got.tobytes() == made.run(x).tobytes()
    fails = iter([*[False] * 20, *[True] * 200])
    monkeypatch.setattr(groups_module, "run_task", _failing(fails))
    with pytest.raises(
        ShardError, match=r"shard 20 of stage 0 failed 3 times; .*: the disk is gone"
    ) as caught:
        made.run(mapped(tmp_path, x), executor=Inline(), retries=2, max_in_flight=1)
    assert isinstance(caught.value.__cause__, OSError)


def _failing(fails):
    def run(*args):
        if next(fails):
            raise OSError("the disk is gone")
        return run_task(*args)

    return run


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
    got = made.run(Broken(2), executor=Inline(), retries=1, max_in_flight=1)
    assert got.tobytes() == made.run(x).tobytes()
    with pytest.raises(ShardError, match="shard 20 of stage 0 failed 1 times"):
        made.run(Broken(2), executor=Inline(), max_in_flight=1)
