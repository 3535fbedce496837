"""Workers that run shards: the base class, and those of this process."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, wait
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardmap._jax.context import config_value
from shardmap.planning.engine.nodes import box_bytes
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.failures import ShardError, contained
from shardmap.planning.run.shards import Accumulator, Shard
from shardmap.planning.run.tasks import Target, Task

if TYPE_CHECKING:
    from shardmap.planning.run.disk.checkpoint import Checkpoint

READ_AHEAD = 2
"""How many shards are read or computed at once in this process by default."""

LARGE = 2**25
"""If shards of a stage read more bytes than this, only one is under way by default."""

BEHIND = 4
"""How many partial results, for each shard under way, wait for an earlier one."""


class Workers:
    """Runs tasks by an executor, by default ``ahead`` at once."""

    # Whether others read files that this process writes, and write the checkpoint.
    in_other_processes = False

    def __init__(
        self,
        executor: Any,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        acc: Accumulator,
        saved: "Checkpoint | None" = None,
    ) -> None:
        self.cut_program, self.leaves, self.acc = cut_program, leaves, acc
        self.executor, self.saved = executor, saved
        # Two for each worker, so that none waits for the next shard.
        workers = getattr(executor, "_max_workers", None) or os.cpu_count() or 1
        self.ahead = 2 * int(workers)

    def shard(self, task: Task) -> Shard:
        return Shard(self.cut_program, task.stage, task.number)

    def read(self, shard: Shard) -> tuple[Any, ...]:
        return self.cut_program.read(shard.recipe, self.leaves, self.acc.kept)

    def submit(self, task: Task) -> Any:
        """Starts a task, and returns its future."""
        raise NotImplementedError

    def result(self, task: Task, future: Any) -> Any:
        """The results of a task; None for those that are written or combined."""
        return future.result()

    def run(self, tasks: Iterable[Task], ahead: int, retries: int) -> Iterator[Task]:
        """Runs shards, ``ahead`` at once, and yields those whose results are put."""
        numbered = enumerate(tasks)
        waiting: dict[int, tuple[Task, int, Future[Any]]] = {}
        results = _InOrder(self.acc)
        try:
            while True:
                room = ahead - len(waiting)
                if results.held >= BEHIND * ahead:
                    room = 0
                taken = [*itertools.islice(numbered, room)]
                for number, task in taken:
                    done = self.saved.load(task) if self.saved else None
                    if done is None:
                        waiting[number] = task, 1, self._submitted(task)
                        continue
                    results.put(number, task, done)
                    yield task
                if not waiting:
                    if not taken:
                        return
                    continue
                number = _first_done(waiting)
                task, attempt, future = waiting.pop(number)
                try:
                    result = self.result(task, future)
                except Exception as error:
                    if isinstance(error, BrokenExecutor):
                        raise ShardError(
                            f"the executor broke down while shard {task.number} of "
                            f"stage {task.stage.number} was under way ({error}); run "
                            "again with a new one, checkpoint= keeps what is done"
                        ) from error
                    if attempt > retries:
                        raise self.shard(task).error(error, attempt) from error
                    waiting[number] = task, attempt + 1, self._submitted(task)
                    continue
                if self.saved and not self.in_other_processes:
                    self.saved.file(task).save(result)
                results.put(number, task, result)
                # Otherwise they are held while the next shard runs.
                del future, result
                yield task
        finally:
            for *_, future in waiting.values():
                future.cancel()

    def _submitted(self, task: Task) -> Any:
        """The future of a task, with the error if it cannot be submitted."""
        try:
            return self.submit(task)
        except Exception as error:
            if "cannot schedule new futures" in str(error):
                raise RuntimeError(
                    f"plan.run: {error}: run plans before Python exits, not in atexit, "
                    "and by an executor that is open"
                ) from error
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken


class _InOrder:
    """Puts results into an accumulator: partial ones in the order of their shards.

    Sums of floating-point numbers depend on it. ``held`` counts shards that wait.
    """

    def __init__(self, acc: Accumulator) -> None:
        self._acc, self._next = acc, 0
        self._waiting: dict[int, tuple[Sequence[Target], Sequence[Any]] | None] = {}
        self.held = 0

    def put(self, number: int, task: Task, result: Sequence[Any]) -> None:
        is_whole = [combiner == "insert" for _, combiner, _ in task.writes]
        pairs = [*zip(result, is_whole, strict=True)]
        self._acc.put(task.writes, [part if whole else None for part, whole in pairs])
        partial = [None if whole else part for part, whole in pairs]
        self._waiting[number] = None if all(is_whole) else (task.writes, partial)
        self.held += not all(is_whole)
        while self._next in self._waiting:
            if (first := self._waiting.pop(self._next)) is not None:
                self._acc.put(*first)
                self.held -= 1
            self._next += 1


def _first_done(waiting: Mapping[int, tuple[Task, int, Future[Any]]]) -> int:
    """The number of the oldest shard that is done; waits for one."""
    futures = [future for *_, future in waiting.values()]
    done, _ = wait(futures, return_when="FIRST_COMPLETED")
    return next(k for k, (*_, future) in waiting.items() if future in done)


class ThreadWorkers(Workers):
    """Every thread reads, computes and waits for its shard."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.device = config_value("jax_default_device")

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The settings of JAX with which the plan was made, and of this run."""
        with self.cut_program.settings(), jax.default_device(self.device):
            yield

    def submit(self, task: Task) -> Future[Any]:
        return self.executor.submit(contained(self.computed), task)

    def computed(self, task: Task) -> Any:
        shard = self.shard(task)
        with self.settings():
            return [np.asarray(part) for part in shard.results(self.read(shard))]


class LocalWorkers(ThreadWorkers):
    """A pool reads what is not in memory, devices compute, this thread writes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        devices = jax.local_devices()
        # CPU devices share their cores: only one gets the work.
        several = len(devices) > 1 and devices[0].platform != "cpu"
        self.devices = itertools.cycle(devices if several else [None])
        reads = (stage.recipe(0)[1].reads for stage in self.cut_program.stages)
        is_large = any(sum(box_bytes(*x) for x in each) > LARGE for each in reads)
        self.ahead = 1 if is_large else READ_AHEAD
        arrays = [*self.leaves, *self.acc.given.values()]
        self.in_memory = all(
            isinstance(array, np.ndarray | jax.Array) or not np.shape(array)
            for array in arrays
        )
        # Reads wait for disks and networks, and overlap; shards would share the cores.
        self.starting = threading.Lock()

    def submit(self, task: Task) -> Future[Any]:
        device = next(self.devices)
        if not self.in_memory:
            return self.executor.submit(contained(self.started), task, device)
        # Handing a small shard to another thread takes longer than running it.
        future: Future[Any] = Future()
        future.set_result(self.started(task, device))
        return future

    def started(self, task: Task, device: jax.Device | None) -> Any:
        shard = self.shard(task)
        with self.settings():
            args = self.read(shard)
            if device is not None:
                args = jax.device_put(args, device)
            with self.starting:
                return shard.results(args)

    def result(self, task: Task, future: Future[Any]) -> Any:
        return [np.asarray(part) for part in future.result()]
