"""Workers that run shards: the base class, and those of this process."""

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import jax
import numpy as np

from shardmap._jax.context import config_value
from shardmap.planning.engine.keys import box_bytes
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.cut_program import CutProgram
from shardmap.planning.run.disk.checkpoint import Checkpoint
from shardmap.planning.run.failures import ShardError, WorkerError, contained
from shardmap.planning.run.shards import Accumulator, Shard
from shardmap.planning.run.tasks import Task, shard_tasks
from shardmap.units import error_text

AHEAD = 2 * (os.cpu_count() or 1)
"""How many shards an executor is given at once by default."""

READ_AHEAD = 2
"""How many shards are read or computed at once in this process by default."""

LARGE = 2**25
"""If shards of a stage read more bytes than this, only one is under way by default."""


class Workers:
    """Runs tasks by an executor.

    Args:
      executor: what runs the tasks.
      cut_program: the plan.
      leaves: its arguments.
      acc: the accumulator of results.
      saved: the checkpoint that results are saved to and loaded from.
    """

    ahead = AHEAD
    in_other_processes = (
        False  # Whether other processes read files that this one writes.
    )

    def __init__(
        self,
        executor: Any,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        acc: Accumulator,
        saved: Checkpoint | None = None,
    ) -> None:
        self.cut_program, self.leaves, self.acc = cut_program, leaves, acc
        self.executor, self.saved = executor, saved

    def tasks(self, stage: Stage, numbers: Iterable[int]) -> Iterable[Task]:
        """The tasks of a stage. Partial results that none folds are folded here."""
        return shard_tasks(stage, numbers)

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
        """Runs tasks and puts their results into the accumulator.

        Args:
          tasks: the tasks of one stage, each after those that it needs.
          ahead: how many may be under way.
          retries: how often a task that fails is tried again.

        Yields:
          The tasks that are done.
        """
        waiting: collections.deque[tuple[Task, Any, Any]] = collections.deque()
        tasks = iter(tasks)
        try:
            while True:
                for task in itertools.islice(tasks, ahead - len(waiting)):
                    done = self.saved and self.saved.load(task)
                    future = self._submitted(task) if done is None else None
                    waiting.append((task, future, done))
                if not waiting:
                    return
                # The oldest one, though others may be done: sums of floating-point
                # numbers depend on their order.
                task, future, result = waiting.popleft()
                if future is not None:
                    result = self.tried(task, future, retries)
                    if self.saved:
                        self.saved.save(task, result)
                self.acc.put(task.writes, result)
                # Otherwise they are held while the next task runs.
                del future, result
                yield task
        finally:
            for _, future, _ in waiting:
                if future is not None:
                    future.cancel()

    def tried(self, task: Task, future: Any, retries: int) -> Any:
        """The results of a task, which is tried again if it fails."""
        attempt = 1
        while True:
            try:
                return self.result(task, future)
            except BrokenExecutor as error:
                raise ShardError(
                    f"the executor broke down while {named(task)} was under way "
                    f"({error}); run again with a new one, checkpoint= keeps what is "
                    "done"
                ) from error
            except Exception as error:
                if attempt > retries:
                    reads = ""
                    if not task.needs:
                        reads = f"; it reads {self.shard(task).in_slices}"
                    often = f" {attempt} times" if attempt > 1 else ""
                    text = error_text(error)
                    if isinstance(error, WorkerError):
                        text = str(error)
                    raise ShardError(
                        f"{named(task)} failed{often}{reads}: {text}"
                    ) from error
                attempt += 1
                future = self._submitted(task)

    def _submitted(self, task: Task) -> Any:
        """The future of a task, with the error if it cannot be submitted."""
        try:
            return self.submit(task)
        except Exception as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken


def named(task: Task) -> str:
    """The name of a task in messages."""
    shard = f"shard {task.number} of stage {task.stage.number}"
    return f"the fold of partial results up to {shard}" if task.needs else shard


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
            return [np.asarray(part) for part in shard.function(*self.read(shard))]


class LocalWorkers(ThreadWorkers):
    """Starts shards on the devices, while this thread waits for results and writes.

    A pool reads what is not in memory.
    """

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
                return shard.function(*args)

    def result(self, task: Task, future: Future[Any]) -> Any:
        return [np.asarray(part) for part in future.result()]
