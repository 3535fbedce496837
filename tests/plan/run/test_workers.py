"""Where shards are computed: each way gives the same, with this thread's settings."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.cutting import cut_program
from shardmap.plan.run.shards import Accumulator, Shards
from shardmap.plan.run.workers import Here, Threads
from tests.plan.plan_programs import X


class Inline:
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


def assert_works(kind, executor, fun=lambda x: jnp.sin(x) + jnp.arange(8.0)[:, None]):
    cut = cut_program(fun, (X,), ({0: 4},))
    acc = Accumulator(cut)
    work = kind(cut, [X], acc, executor)
    assert len(list(work.run_stage(Shards(cut, cut.stages), 2, 0, None))) == 4
    np.testing.assert_allclose(acc.result(), jax.jit(fun)(X), rtol=1e-6)


@pytest.mark.parametrize("kind", [Here, Threads])
def test_threads_give_what_the_function_gives(kind):
    with ThreadPoolExecutor(2) as pool:
        assert_works(kind, pool)


def test_other_processes_get_bytes_and_numpy_arrays():
    pytest.importorskip("flatbuffers")
    executor = Inline()
    assert_works(Elsewhere, executor)
    assert len(executor.blobs) == 4
    # Shards that differ in their place only are one function.
    assert len(set(executor.blobs)) == 1


@pytest.mark.parametrize("kind", [Here, Threads])
def test_a_thread_has_the_settings_of_the_one_that_asked(kind):
    seen = []

    class Watched(np.ndarray):
        def __getitem__(self, index):
            seen.append((threading.current_thread(), jax.config.jax_enable_x64))
            return np.asarray(self)[index]

    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:
        x = np.ones((4, 2)).view(Watched)
        cut = cut_program(lambda x: x * 2, (x,), ({0: 2},))
        acc = Accumulator(cut)
        work = kind(cut, [x], acc, pool)
        shard = Shards(cut, cut.stages)[0]
        [part] = work.result(shard, work.submit(shard))
    assert part.dtype == np.float64
    assert [x64 for _, x64 in seen] == [True]
    assert seen[0][0] is not threading.current_thread()
