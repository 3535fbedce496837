"""Shards on a Dask cluster: data goes from storage to worker to storage.

Functions and boxes that several shards need are tasks of their own, so that they travel
once and are made again where a worker is lost. Partial results are combined on the
workers.
"""

import collections
import importlib
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, NamedTuple

import numpy as np

from shardmap.arrays.sources.registry import Away
from shardmap.plan.away.cores import take_share_of_all, where
from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.away.tasks import Read, Write, run_task
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, slices
from shardmap.plan.engine.stages import Stage
from shardmap.plan.run.buffers import put
from shardmap.plan.run.folding import FoldTask, FoldTasks, fold_all
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.workers import ShardError

SMALL = 2**10
"""Up to how many bytes an array travels with each task that needs it."""

INSIDE = 2**22
"""Up to how many bytes an array is part of a task, from where it can be had again."""

NO_WORKERS = "distributed.scheduler.no-workers-timeout"
"""Dask's setting for how long work waits for workers; without one 5 minutes."""


def same(thing: Any) -> Any:
    """The function of a task that holds a value."""
    return thing


def fold_there(
    combiner: str,
    start: np.ndarray | None,
    places: Sequence[int | None],
    results: Sequence[Any],
) -> np.ndarray:
    """`fold_all` of results of shards, of which it takes one each, or of other folds.

    Args:
      combiner: how.
      start: what they are combined with first.
      places: for each, its place in the results of a shard; None if it is a fold.
      results: what has been made.
    """
    made = zip(places, results, strict=True)
    return fold_all(combiner, start, (x if k is None else x[k] for k, x in made))


def others(places: Sequence[int], result: Sequence[Any]) -> list[Any]:
    """A shard's results without those that are combined on the cluster."""
    return [None if k in places else part for k, part in enumerate(result)]


class Dask(Elsewhere):
    """Runs shards by a `distributed.Client`, which is the executor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.client: Any = self.executor
        self.name = f"shardmap-{secrets.token_hex(4)}"
        self.numbers = itertools.count()
        self.held_there: dict[Any, Any] = {}
        self.folds: FoldTasks
        self.nodes: dict[Any, tuple[Any, int | None]] = {}
        self.tops: collections.deque[tuple[FoldTask, Any]] = collections.deque()
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

    def task(self, what: str, function: Any, *args: Any) -> Any:
        key = f"{self.name}-{what}-{next(self.numbers)}"
        return self.client.submit(function, *args, key=key, pure=False)

    def blob(self, shard: Shard) -> Any:
        key = shard.stage, shard.recipe.static
        if key not in self.held_there:
            blob = self.functions.of(shard)
            self.held_there[key] = self.task("function", same, blob)
        return self.held_there[key]

    def once(self, source: Away) -> Any:
        """A future of the description of a source, which tasks share."""
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
        """A box for a shard: where it is, its array, or a future of that."""
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

    def submit(self, shard: Shard) -> "Submitted":
        args = self.args(shard)
        writes = [
            write and Write(self.once(write.sink), write.box)
            for write in (self.travels.write(*write) for write in shard.writes())
        ]
        what = f"stage-{shard.stage}"
        future = self.task(what, run_task, self.blob(shard), args, writes)
        if self.keeps:
            return Submitted(future, future)
        folded = [k for k, (_, c, _) in enumerate(shard.writes()) if c != "insert"]
        if len(folded) + len([write for write in writes if write]) == len(writes):
            return Submitted(future, None)
        come = self.task("rest", others, folded, future) if folded else future
        return Submitted(future, come)

    def result(self, shard: Shard, future: Any) -> Any:
        if not isinstance(future, Submitted):  # It could not be submitted.
            return super().result(shard, future)
        result = self.done(future.come or future.shard)
        found = result.result() if future.come else [None for _ in shard.writes()]
        if future.come is None and (error := result.exception()) is not None:
            raise error
        if not self.keeps:
            self._fold(shard, future.shard)
        return found

    def run_stage(self, stage: Stage, *args: Any) -> Iterator[Shard]:
        # What was kept here of earlier stages is not what it is now.
        self.held_there.clear()
        self.folds = FoldTasks(self.cut_program, stage)
        try:
            yield from super().run_stage(stage, *args)
            while self.tops:
                self._fetch()
        finally:
            self.held_there.clear()
            self.nodes.clear()
            self.tops.clear()

    def _fold(self, shard: Shard, future: Any) -> None:
        """Starts the tasks that combine partial results and can run now."""
        for place, (_, combiner, _) in enumerate(shard.writes()):
            if combiner != "insert":
                self.nodes[shard.number, place] = future, place
        for each in self.folds.after(shard.number):
            futures, places = zip(
                *(self.nodes.pop(need.key) for need in each.needs), strict=True
            )
            args = each.combiner, each.start(), list(places), list(futures)
            folded = self.task("fold", fold_there, *args)
            if each.is_top:
                self.tops.append((each, folded))
            else:
                self.nodes[each.key] = folded, None
        while len(self.tops) > self.ahead:
            self._fetch()

    def _fetch(self) -> None:
        """Brings here what the partial results of a box come to."""
        task, future = self.tops.popleft()
        try:
            part = self.done(future).result()
        except Exception as error:
            raise ShardError(
                "partial results could not be put together on the cluster: "
                f"{type(error).__name__}: {error}"
            ) from error
        put(self.acc.buffer(task.value), task.box, "insert", part)


class Submitted(NamedTuple):
    """A shard under way on a cluster.

    Attributes:
      shard: the future of its results.
      come: the future of those that come here, None if none do.
    """

    shard: Any
    come: Any

    def cancel(self) -> None:
        for future in filter(None, self):
            future.cancel()


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"


def is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )
