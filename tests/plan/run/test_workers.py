"""Where shards are computed, and how many are read ahead of that."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardmap.planning.plan import plan
from shardmap.planning.run.failures import ShardError
from shardmap.planning.run.workers import LocalWorkers
from tests.plan.plan_programs import reals
from tests.plan.run.checks import Recorded, W, X, assert_bytes


class Remote(Recorded):
    """A store that counts who reads at the same time; ``wait`` is told the row."""

    def __init__(self, array, wait, failures=()):
        super().__init__(array, failures)
        self.wait, self.reading, self.most = wait, 0, 0

    def __getitem__(self, index):
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        try:
            self.wait(index[0].start)
            return super().__getitem__(index)
        finally:
            with self.lock:
                self.reading -= 1


@pytest.mark.parametrize(("given", "most"), [(None, 1), (1, 1), (2, 2), (4, 4)])
def test_as_many_threads_read_as_shards_may_be_under_way(shard_plan, want, given, most):
    together = threading.Barrier(most, timeout=60)
    x = Remote(X, lambda row: together.wait())
    got = shard_plan.run(x, W, max_in_flight=given)
    assert x.most == most
    assert_bytes(got, shard_plan.run(X, W))
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


def test_no_thread_hands_over_what_is_in_memory(shard_plan):
    threads = set()

    class Watched(np.ndarray):
        def __getitem__(self, index):
            threads.add(threading.get_ident())
            return super().__getitem__(index)

    shard_plan.run(X.view(Watched), W, max_in_flight=4)
    assert threads == {threading.get_ident()}


def test_a_slow_shard_holds_up_no_other(shard_plan):
    """The first shard takes long: the others are written meanwhile."""
    others, ended = threading.Event(), []
    x = Remote(X, lambda row: row or others.wait(60))

    class Out:
        shape, dtype = (64, 4), np.dtype(np.float32)

        def __setitem__(self, index, part):
            if index is not Ellipsis:
                ended.append((index[0].start, len(x.reads)))
            if len(ended) == 7:
                others.set()

        def __getitem__(self, index):
            raise AssertionError("inserting reads nothing")

    shard_plan.run(x, W, out=(None, Out()), max_in_flight=3)
    starts = [start for start, _ in ended]
    assert starts[-1] == 0
    assert sorted(starts) == list(range(0, 64, 8))
    # At most three besides those that are done.
    assert all(reads <= k + 3 for k, (_, reads) in enumerate(ended))


def test_many_partial_results_wait_for_a_slow_one_in_order():
    x = reals(200, 8)
    shard_plan = plan(lambda x: (x.sum(0), x.max()), x, in_slices={0: 100})
    slow = Remote(x, lambda row: row or time.sleep(0.2))
    with ThreadPoolExecutor(2) as pool:
        got = shard_plan.run(slow, executor=pool, max_in_flight=2)
    assert_bytes(got, shard_plan.run(x))


def test_a_pool_has_two_shards_for_each_of_its_workers():
    x, many = reals(64, 4), 12
    entered, all_in = [], threading.Barrier(many, timeout=30)

    class Waiting(Recorded):
        def __getitem__(self, index):
            entered.append(index)
            if len(entered) <= many:
                all_in.wait()
            return super().__getitem__(index)

    shard_plan = plan(lambda x: 2 * x, x, in_slices={0: 64})
    with ThreadPoolExecutor(many) as pool:
        got = shard_plan.run(Waiting(x), executor=pool)
    np.testing.assert_array_equal(got, 2 * x)


def test_a_pool_that_takes_no_shards_is_told(shard_plan):
    """As any pool while Python exits, in a function of atexit."""
    with ThreadPoolExecutor(1) as pool:
        pass
    with pytest.raises(RuntimeError, match="before Python exits, not in atexit, and b"):
        shard_plan.run(X, W, executor=pool)


def test_the_error_of_the_shard_that_fails_first_is_told(shard_plan, monkeypatch):
    # Row 0 fails when it is known that row 16 did.
    known, usual = threading.Event(), LocalWorkers.result

    def result(self, task, future):
        if task.number == 2:
            known.set()
        return usual(self, task, future)

    monkeypatch.setattr(LocalWorkers, "result", result)
    x = Remote(X, lambda row: row or known.wait(60), failures=[(0, 1), (16, 1)])
    with pytest.raises(ShardError, match="shard 2 of stage 0 failed; it reads"):
        shard_plan.run(x, W, max_in_flight=4)
    assert x.reading == 0
