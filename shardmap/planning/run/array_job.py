"""One process of an array job: the same program in each, with a folder they share.

Each process runs its shards of every stage, and keeps their results in the folder.
Partial results are folded there too: each fold is a file, which the process of the last
shard below it makes. A later stage reads boxes from these files. A process waits for
files that others make; the process that finds a damaged file makes it again.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardmap.planning.engine.nodes import Value, data_aval
from shardmap.planning.engine.slices import Box, slices
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.blocks import Blocks, put_together
from shardmap.planning.run.buffers import put
from shardmap.planning.run.cut_program import CutProgram, spec
from shardmap.planning.run.disk.checkpoint import Checkpoint
from shardmap.planning.run.shards import Accumulator, Shard
from shardmap.planning.run.tasks import Target, Task, all_tasks, run_fold
from shardmap.units import integer_of, shown

TOLD = 600.0
"""The seconds after which a process says again for which other one it waits."""

LONGEST = 1.0
"""The most seconds between two looks for a file that another process makes."""


def place_in_job(task: Any) -> tuple[int, int]:
    """Checks ``task``: the number of this process, and how many the job has."""
    if not isinstance(task, Sequence) or isinstance(task, str) or len(task) != 2:
        raise TypeError(
            "task must be a pair (index, count): which task of an array job this "
            f"is, from 0, and how many there are; got {shown(task)}"
        )
    count = integer_of("the count of task", task[1], least=1)
    index = integer_of("the index of task", task[0], least=0)
    if index >= count:
        raise ValueError(
            f"the index of task must be less than its count {count}, got {index}: "
            "count from 0"
        )
    return index, count


class ArrayJob(Accumulator):
    """The accumulator of one process; results stay in the folder."""

    def __init__(
        self,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        task: tuple[int, int],
        saved: Checkpoint,
        stage: int | None,
    ) -> None:
        super().__init__(cut_program)
        self.stage = stage
        self.index, self.count = task
        self.leaves, self.saved = leaves, saved
        self.stored: dict[Value, Stored] = {}
        self._told: dict[tuple[int, int], float] = {}
        self._telling = threading.Lock()

    @property
    def is_last(self) -> bool:
        """Whether this process returns the result."""
        is_end = self.stage in (None, len(self.cut_program.stages) - 1)
        return is_end and self.index == self.count - 1

    def numbers(self, stage: Stage) -> range:
        """Its shards of a stage."""
        if self.stage not in (None, stage.number):
            return range(0)
        first, last = (
            k * stage.num_shards // self.count for k in (self.index, self.index + 1)
        )
        return range(first, last)

    def owner(self, task: Task) -> int:
        """The process that runs a task."""
        return ((task.number + 1) * self.count - 1) // task.stage.num_shards

    def put(self, writes: Iterable[Target], result: Sequence[Any]) -> None:
        pass

    def free(self, place: int) -> list[Value]:
        # A damaged result of any stage may have to be made again.
        return []

    def end_stage(self, stage: Stage) -> None:
        """Runs its folds of a stage, and keeps the values that later stages read."""
        needs: dict[Value, dict[Box, tuple[Task, int]]]
        needs = {result.value: {} for result in stage.results}
        for task in all_tasks(stage):
            for place, (box, combiner, value) in enumerate(task.writes):
                if combiner == "insert":
                    needs[value][box] = task, place
            if task.needs and self.owner(task) == self.index:
                needed = (self.saved.has(each) for each, _ in task.needs)
                # In a job of one stage others may begin later: their folds are left to
                # those who read them.
                if not self.saved.has(task) and (self.stage is None or all(needed)):
                    self.make(task)
        end = None if self.stage is None else self.stage + 1
        later = self.cut_program.stages[stage.number + 1 : end]
        for result in stage.results:
            value = result.value
            stored = Stored(value, needs[value], self.load)
            self.stored[value] = stored
            if any(value in each.reads for each in later):
                is_large = self.cut_program.is_large(value)
                self.kept[value] = stored if is_large else np.asarray(stored)

    def load(self, task: Task, place: int) -> np.ndarray:
        """A result of a task, as soon as it is there."""
        self.wait(task)
        loaded = self.saved.load(task, [place])
        return self.make(task)[place] if loaded is None else loaded[0]

    def wait(self, task: Task) -> None:
        """Waits for the file of another process."""
        owner, seconds = self.owner(task), 0.01
        if self.stage is not None and (task.needs or task.stage.number < self.stage):
            return
        while owner != self.index and not self.saved.has(task):
            self._tell(task, owner)
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST)

    def _tell(self, task: Task, owner: int) -> None:
        key, now = (task.stage.number, owner), time.monotonic()
        with self._telling:  # Threads of a pool wait for the same process.
            if now < self._told.get(key, now):
                return
            self._told[key] = now + TOLD
            sys.stderr.write(
                f"task {self.index} of {self.count} waits for task {owner}: "
                f"{self.saved.folder.path}/{task.name} is not there yet. If task "
                f"{owner} has failed, start it again, and this one goes on\n"
            )
            sys.stderr.flush()

    def make(self, task: Task) -> list[np.ndarray]:
        """Runs a task and keeps its results, also in place of a damaged file."""
        if task.needs:
            parts = (
                [self.load(need, place) for place in places]
                for need, places in task.needs
            )
            results = run_fold(task.combiner, task.starts, parts)
        elif task.stage.number < (self.stage or 0) and not self.saved.has(task):
            raise ValueError(
                f"stage={self.stage} needs {task.name} of stage {task.stage.number}, "
                f"which is not in {self.saved.folder.path}: run all tasks of that "
                "stage before"
            )
        else:
            shard = Shard(self.cut_program, task.stage, task.number)
            args = self.cut_program.read(shard.recipe, self.leaves, self.kept)
            results = [np.asarray(part) for part in shard.function(*args)]
        self.saved.file(task).save(results)
        return results

    def put_into(self, acc: Accumulator) -> None:
        """Puts the function's results into an accumulator, once all are there."""
        graph = self.cut_program.graph
        outputs = {v: self.stored[v] for v in graph.outputs if isinstance(v, Value)}
        for stored in outputs.values():
            for task, _ in stored.tasks.values():
                self.wait(task)
        for value, stored in outputs.items():
            for box, need in stored.tasks.items():
                put([acc.buffer(value)], [box], "insert", [self.load(*need)])


class Stored:
    """A value in files, read box by box: of a task, the result of a number."""

    def __init__(
        self,
        value: Value,
        needs: Mapping[Box, tuple[Task, int]],
        load: Callable[[Task, int], np.ndarray],
    ) -> None:
        aval = data_aval(value.aval)
        self.shape, self.dtype, self.tasks = aval.shape, aval.dtype, needs
        self._value, self._load = value, load
        self._blocks = Blocks(needs, len(value.shape))

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        box = tuple(
            each.indices(size)[:2]
            for each, size in zip(index, self._value.shape, strict=True)
        )
        parts = (
            (self._load(*need)[slices(there)], here)
            for need, there, here in self._blocks.overlapping(box)
        )
        return put_together(*spec(self._value, box), parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(0, n) for n in self._value.shape)], dtype)
