"""Shards on a Dask cluster: data goes from storage to worker to storage.

Functions and boxes that several shards need are tasks of their own, so that they travel
once and are made again where a worker is lost. Partial results stay on the workers and
are folded there, as the tree that they are folded as everywhere.
"""

import importlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any

import numpy as np

from shardmap.arrays.sources.registry import Away
from shardmap.plan.away.cores import take_share_of_all, where
from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.away.tasks import Read, Write, run_task
from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, slices, volume
from shardmap.plan.run.buffers import COMBINE, FOLDED, Fold, put, start_dtype
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.workers import Saved, ShardError, broke_down, failed

SMALL = 2**10
"""Up to how many bytes an array travels with each task that needs it."""

INSIDE = 2**22
"""Up to how many bytes an array is part of a task, from where it can be had again."""

NO_WORKERS = "distributed.scheduler.no-workers-timeout"
"""Dask's setting for how long work waits for workers; without one 5 minutes."""

FETCHED = 400
"""Partial results come here when shards have read so many times their bytes."""


def same(thing: Any) -> Any:
    """What a task gives that only holds something."""
    return thing


def fold(
    combiner: str, places: Sequence[int | None], results: Sequence[Any]
) -> np.ndarray:
    """Puts partial results together, from the first to the last.

    Args:
      combiner: how.
      places: for each, its place in the results of a shard; None if it is one already.
      results: what has been made.
    """
    made = zip(places, results, strict=True)
    total, *parts = (each if k is None else each[k] for k, each in made)
    with np.errstate(all="ignore"):
        for part in parts:
            total = COMBINE[combiner](total, part)
    return np.asarray(total)


def others(places: Sequence[int], result: Sequence[Any]) -> list[Any]:
    """A shard's results without those that are folded elsewhere."""
    return [None if k in places else part for k, part in enumerate(result)]


class Dask(Elsewhere):
    """Runs shards by a `distributed.Client`, which is the executor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.client: Any = self.executor
        self.name = f"shardmap-{secrets.token_hex(4)}"
        self.numbers = itertools.count()
        self.held_there: dict[Any, Any] = {}
        # Four shards for each thread of the cluster, as it is now.
        self.ahead = 4 * max(self._threads(), 1)
        self._share_cores()

    def _threads(self) -> int:
        return sum(self.client.nthreads().values())

    def _share_cores(self) -> None:
        """Gives workers of one machine that have not started JAX their cores each."""
        machines: dict[str, list[str]] = {}
        for worker, (machine, process) in self.client.run(where).items():
            if (machine, process) != where():
                machines.setdefault(machine, []).append(worker)
        for workers in machines.values():
            for index, worker in enumerate(workers):
                if len(workers) > 1:
                    share = take_share_of_all
                    self.client.run(share, index, len(workers), workers=[worker])

    def done(self, future: Any) -> Any:
        """Waits until a future is done, and gives it.

        Raises:
          BrokenExecutor: the cluster has had no worker for too long.
        """
        dask, distributed = map(importlib.import_module, ("dask", "distributed"))
        longest = dask.config.get(NO_WORKERS, None) or "5 minutes"
        seen = time.monotonic()
        while not future.done():
            try:
                distributed.wait(future, timeout=1)
            except TimeoutError:
                now = time.monotonic()
                if self._threads():
                    seen = now
                elif now - seen > dask.utils.parse_timedelta(longest):
                    raise BrokenExecutor(
                        f"its cluster has had no worker for {now - seen:.0f} s; Dask's "
                        f"setting {NO_WORKERS} says how long to wait for one"
                    ) from None
        return future

    def result(self, shard: Shard, future: Any) -> Any:
        return super().result(shard, self.done(future))

    def task(self, what: str, function: Any, *args: Any, retries: int = 0) -> Any:
        key = f"{self.name}-{what}-{next(self.numbers)}"
        return self.client.submit(function, *args, key=key, retries=retries, pure=False)

    def blob(self, shard: Shard) -> Any:
        key = shard.stage, shard.recipe.static
        if key not in self.held_there:
            blob = self.functions.of(shard)
            self.held_there[key] = self.task("function", same, blob)
        return self.held_there[key]

    def once(self, source: Away) -> Any:
        """A future of what is said of a source, which is much for each task."""
        key = id(source)  # Of those in ``travels``, which stay; two may be one file's.
        if key not in self.held_there:
            self.held_there[key] = self.task("source", same, source)
        return self.held_there[key]

    def there(self, array: np.ndarray) -> Any:
        """An array on the cluster."""
        if array.nbytes <= INSIDE:
            return self.task("array", same, array)
        return self.client.scatter(array, hash=False)

    def arg(self, value: Value, box: Box) -> Any:
        """A box for a shard: where it is, what it is, or a future of it."""
        read = self.travels.read(value, box)
        if read is not None:
            return Read(self.once(read.source), *read[1:])
        given = value in self.cut_program.graph.inputs
        leaf: Any = self.leaves[value.number] if given else None
        if is_dask(leaf):
            dtype = value.aval.dtype
            part = leaf[slices(box)].astype(dtype)
            return self.client.compute(part)
        key = value, box
        if key not in self.held_there:
            array = self.held(value, box)
            whole = box == tuple((0, size) for size in value.shape)
            found = array if array.nbytes <= SMALL else self.there(array)
            if not whole:
                return found
            self.held_there[key] = found
        return self.held_there[key]

    def submit(self, shard: Shard, retries: int = 0) -> Any:
        starts = shard.recipe.starts
        args = [self.arg(value, box) for value, box in shard.recipe.reads]
        args.append(np.asarray(starts, start_dtype(starts)))
        writes = [
            write and Write(self.once(write.sink), write.box)
            for write in (self.travels.write(*write) for write in shard.writes())
        ]
        what = f"stage-{shard.stage}"
        return self.task(
            what, run_task, self.blob(shard), args, writes, retries=retries
        )

    def run_stage(
        self, shards: Sequence[Shard], ahead: int, retries: int, saved: Saved | None
    ) -> Iterator[Shard]:
        if saved is not None:
            yield from super().run_stage(shards, ahead, retries, saved)
            return
        # What was kept here of earlier stages is not what it is now.
        self.held_there.clear()
        folds: dict[Any, _Fold] = {}
        waiting: deque[tuple[Shard, Any, Any]] = deque()
        numbers = iter(range(len(shards)))
        try:
            while True:
                for number in itertools.islice(numbers, ahead - len(waiting)):
                    shard = shards[number]
                    future = self._started(shard, retries)
                    waiting.append((shard, future, self._wanted(shard, future)))
                if not waiting:
                    break
                shard, future, wanted = waiting.popleft()
                self.acc.put(shard, self._outcome(shard, future, wanted, retries))
                self._fold(shard, future, folds)
                yield shard
            for one in folds.values():
                one.fetch()
        finally:
            for _, *futures in waiting:
                for future in futures:
                    if future is not None:
                        future.cancel()
            self.held_there.clear()

    def _started(self, shard: Shard, retries: int) -> Any:
        for attempt in itertools.count(1):
            try:
                return self.submit(shard, retries)
            except Exception as error:  # What is read here could not be.
                if attempt > retries:
                    raise failed(shard, attempt, error) from error
        raise AssertionError

    def _wanted(self, shard: Shard, future: Any) -> Any:
        """What comes here of a shard's results, None if nothing does."""
        writes = list(shard.writes())
        folded = [k for k, (_, c, _) in enumerate(writes) if c != "insert"]
        there = [k for k, write in enumerate(writes) if self.travels.write(*write)]
        if len(folded) + len(there) == len(writes):
            return None
        return self.task("rest", others, folded, future) if folded else future

    def _outcome(self, shard: Shard, future: Any, wanted: Any, retries: int) -> Any:
        try:
            if wanted is not None:
                return self.done(wanted).result()
            error = self.done(future).exception()
            if error is not None:
                raise error
            return [None for _ in shard.writes()]
        except BrokenExecutor as error:
            raise broke_down(shard, error) from error
        except Exception as error:
            raise failed(shard, retries + 1, error) from error

    def _fold(self, shard: Shard, future: Any, folds: dict[Any, "_Fold"]) -> None:
        read = sum(volume(box) * itemsize(v.aval) for v, box in shard.recipe.reads)
        for place, (box, combiner, value) in enumerate(shard.writes()):
            if combiner != "insert":
                if (value, box) not in folds:
                    folds[value, box] = _Fold(self, value, box, combiner, read)
                folds[value, box].add(future, place)


class _Fold:
    """The partial results of one box, on their way to one.

    The lower levels of their tree are made on the workers. Its nodes come here as soon
    as that is little, and so what a lost worker had is little too.

    Args:
      work: the engine.
      value: what is made.
      box: which part of it.
      combiner: how.
      read: the bytes that a shard reads.
    """

    def __init__(
        self, work: Dask, value: Value, box: Box, combiner: str, read: int
    ) -> None:
        self.work, self.value, self.box, self.combiner = work, value, box, combiner
        self.left = count = work.cut_program.parts[value]
        size = volume(box) * itemsize(value.aval)
        there, shards = 1, FOLDED
        while shards < count and shards * read < FETCHED * size:
            there, shards = there + 1, shards * FOLDED
        self.levels: list[list[tuple[Any, int | None]]] = [[] for _ in range(there)]
        self.here = Fold(combiner, -(-count // shards))
        self.coming: Any = None

    def add(self, future: Any, place: int) -> None:
        self.left -= 1
        node: tuple[Any, int | None] = future, place
        for level in self.levels:
            level.append(node)
            if self.left and len(level) < FOLDED:
                return
            futures, places = zip(*level, strict=True)
            level.clear()
            args = self.combiner, list(places), list(futures)
            node = self.work.task("fold", fold, *args), None
        self.fetch()
        self.coming = node[0]

    def fetch(self) -> None:
        """Brings here what is on its way."""
        if self.coming is None:
            return
        try:
            node = self.work.done(self.coming).result()
        except Exception as error:
            raise ShardError(
                "partial results could not be put together on the cluster: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.coming = None
        made = self.here.add(node)
        if made is not None:
            put(self.work.acc.kept[self.value], self.box, self.combiner, made)


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"


def is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )
