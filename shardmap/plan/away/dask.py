"""Shards on a Dask cluster: data goes from storage to worker to storage.

Functions and boxes that several shards need are tasks of their own, so that they travel
once and are made again where a worker is lost. Partial results stay on the workers and
are folded there, as the tree that they are folded as everywhere.
"""

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
from shardmap.plan.engine.keys import box_bytes
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, slices
from shardmap.plan.run.buffers import FOLDED, Fold, fold
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.workers import ShardError

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


def fold_there(
    combiner: str, places: Sequence[int | None], results: Sequence[Any]
) -> np.ndarray:
    """`fold` of results of shards, of which it takes one each, or of nodes.

    Args:
      combiner: how.
      places: for each, its place in the results of a shard; None if it is a node.
      results: what has been made.
    """
    made = zip(places, results, strict=True)
    return fold(combiner, (each if k is None else each[k] for k, each in made))


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
        self.folds: dict[tuple[Value, Box], There] = {}
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

    def run_stage(self, *args: Any) -> Iterator[Shard]:
        # What was kept here of earlier stages is not what it is now.
        self.held_there.clear()
        self.folds.clear()
        try:
            yield from super().run_stage(*args)
            for key in self.folds:
                self._fetch(*key)
        finally:
            self.held_there.clear()

    def _fold(self, shard: Shard, future: Any) -> None:
        """Puts the partial results of a shard together, on the cluster at first."""
        for place, (box, combiner, value) in enumerate(shard.writes()):
            if combiner == "insert":
                continue
            if (value, box) not in self.folds:
                levels = self._levels(shard, value, box)
                count = self.cut_program.parts[value]
                tree = Fold(combiner, count, levels, self._combined, FOLDED)
                self.folds[value, box] = There(tree, levels, combiner)
            node = self.folds[value, box].tree.add((future, place))
            if node is not None:
                self._fetch(value, box)
                self.folds[value, box].coming = node

    def _levels(self, shard: Shard, value: Value, box: Box) -> int:
        """How many levels of a tree are made on the cluster.

        Its nodes come here as soon as that is little, and so what a lost worker had is
        little too.
        """
        read = sum(box_bytes(*each) for each in shard.recipe.reads)
        size = box_bytes(value, box)
        levels, shards = 1, FOLDED
        while shards < self.cut_program.parts[value] and shards * read < FETCHED * size:
            levels, shards = levels + 1, shards * FOLDED
        return levels

    def _combined(self, combiner: str, nodes: list[Any], own: bool = False) -> Any:
        futures, places = zip(*nodes, strict=True)
        args = combiner, list(places), list(futures)
        return self.task("fold", fold_there, *args), None

    def _fetch(self, value: Value, box: Box) -> None:
        """Brings here the last node, which the cluster has had time to make."""
        there = self.folds[value, box]
        if there.coming is None:
            return
        future, place = there.coming
        if place is not None:
            future, _ = self._combined(there.combiner, [there.coming])
        try:
            node = self.done(future).result()
        except Exception as error:
            raise ShardError(
                "partial results could not be put together on the cluster: "
                f"{type(error).__name__}: {error}"
            ) from error
        there.coming = None
        covers = min(FOLDED**there.levels, there.left)
        there.left -= covers
        self.acc.put_together(value, box, node, there.levels, covers)


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


class There:
    """The lower levels of a tree of partial results, which are made on a cluster.

    Args:
      tree: these levels; its nodes are futures.
      levels: how many.
      combiner: how.

    Attributes:
      coming: the last node, which has not been brought here.
      left: how many partial results have not been brought here.
    """

    def __init__(self, tree: Fold, levels: int, combiner: str) -> None:
        self.tree, self.levels, self.combiner = tree, levels, combiner
        self.coming: Any = None
        self.left = tree.left


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"


def is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )
