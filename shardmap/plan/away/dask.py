"""Shards on a Dask cluster: data goes from storage to worker to storage.

Functions and boxes that several shards need are tasks of their own, so that they travel
once and are made again where a worker is lost. Partial results stay on the workers and
are folded there, always in the order of the shards, some at a time.
"""

import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardmap.arrays.sources.registry import Away
from shardmap.plan.away.cores import take_share_of_all, where
from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.away.tasks import Read, Write, run_task
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, slices, volume
from shardmap.plan.run.buffers import COMBINE, start_dtype
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.workers import Saved, failed

FOLDED = 16
"""How many partial results one task folds."""

SMALL = 2**10
"""Up to how many bytes an array travels with each task that needs it."""

INSIDE = 2**22
"""Up to how many bytes an array is part of a task, from where it can be had again."""

FETCHED = 400
"""Partial results come here when shards have read so many times their bytes: should
their worker be lost, only what came after is to be computed again."""


def same(thing: Any) -> Any:
    """What a task gives that only holds something."""
    return thing


def fold(
    combiner: str, place: int, start: np.ndarray, results: Sequence[Any]
) -> np.ndarray:
    """Puts partial results together, from the first to the last."""
    with np.errstate(all="ignore"):
        for result in results:
            start = COMBINE[combiner](start, result[place])
    return np.asarray(start)


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
        """A box for a shard: where it lies, what it is, or a future of it."""
        read = self.travels.read(value, box)
        if read is not None:
            return Read(self.once(read.source), *read[1:])
        given = value in self.cut_program.program.inputs
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
        folds: dict[tuple[Value, Box], _Fold] = {}
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
                return wanted.result()
            error = future.exception()  # When it is done, and nothing else.
            if error is not None:
                raise error
            return [None for _ in shard.writes()]
        except Exception as error:
            raise failed(shard, retries + 1, error) from error

    def _fold(
        self, shard: Shard, future: Any, folds: dict[tuple[Value, Box], "_Fold"]
    ) -> None:
        read = sum(volume(box) for _, box in shard.recipe.reads)
        for place, (box, combiner, value) in enumerate(shard.writes()):
            if combiner != "insert":
                if (value, box) not in folds:
                    folds[value, box] = _Fold(self, value, box, combiner)
                folds[value, box].add(future, place, read)


class _Fold:
    """The partial results of one box, on their way to one."""

    def __init__(self, work: Dask, value: Value, box: Box, combiner: str) -> None:
        self.work, self.value, self.box, self.combiner = work, value, box, combiner
        self.waiting: list[Any] = []
        self.made: Any = None
        self.place = 0
        self.read = 0
        index: Any = slices(box)
        self.index = index
        self.size = volume(box)

    def add(self, future: Any, place: int, read: int) -> None:
        # A result has the same place in all shards of one box, as far as both go.
        if self.waiting and place != self.place:
            self.step()
        self.place = place
        self.waiting.append(future)
        self.read += read
        if len(self.waiting) == FOLDED:
            self.step()
        if self.read > FETCHED * max(self.size, 1) and self.made is not None:
            self.fetch()

    def step(self) -> None:
        """Lets a worker fold what waits."""
        start = self.made
        if start is None:
            buffer = self.work.acc.kept[self.value]
            array = np.array(buffer[self.index])
            start = array if array.nbytes <= SMALL else self.work.there(array)
        args = self.combiner, self.place, start, self.waiting
        self.made = self.work.task("fold", fold, *args)
        self.waiting = []

    def fetch(self) -> None:
        """Brings what is folded here."""
        if self.waiting:
            self.step()
        if self.made is not None:
            self.work.acc.kept[self.value][self.index] = self.made.result()
        self.made, self.read = None, 0


def is_dask(array: Any) -> bool:
    """Whether something is an array of Dask, which may not be installed."""
    return type(array).__module__.partition(".")[0] == "dask"


def is_client(executor: Any) -> bool:
    """Whether something is a client of a Dask cluster."""
    return any(
        cls.__module__.partition(".")[0] == "distributed" and cls.__name__ == "Client"
        for cls in type(executor).__mro__
    )
