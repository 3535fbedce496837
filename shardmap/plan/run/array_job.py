"""One task of an array job: the same program in each task, with a folder they share.

A task runs its shards of each stage, and keeps their results in the folder. Partial
results are folded there too: each node of their tree is a file, which the task of the
last shard below it makes. A later stage reads boxes from these files. A task waits for
files that others make; a damaged file is made again by whoever finds it.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardmap.arrays.combining import identity
from shardmap.plan.engine.keys import data_aval
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box
from shardmap.plan.engine.stages import Stage
from shardmap.plan.run.buffers import put
from shardmap.plan.run.cut_program import CutProgram
from shardmap.plan.run.disk.checkpoint import Checkpoint
from shardmap.plan.run.disk.results import result_name
from shardmap.plan.run.folding import (
    FoldTask,
    FoldTasks,
    Node,
    ShardResult,
    stored_as,
    written,
)
from shardmap.plan.run.shards import Accumulator, Shard
from shardmap.units import integer_of

LONGEST = 1.0
"""The most seconds between two looks for a file that another task makes."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Which task of an array job this is.

    Attributes:
      index: its number, from 0.
      count: how many there are.
    """

    index: int
    count: int

    @classmethod
    def of(cls, task: Any) -> "Task":
        """What was given as ``task``.

        Raises:
          TypeError, ValueError: it is no such pair.
        """
        if not isinstance(task, Sequence) or isinstance(task, str) or len(task) != 2:
            raise TypeError(
                "task must be a pair (index, count): which task of an array job this "
                f"is, from 0, and how many there are; got {task!r}"
            )
        index = integer_of("the index of task", task[0], least=0)
        count = integer_of("the count of task", task[1], least=1)
        if index >= count:
            raise ValueError(
                f"task must be from (0, {count}) to ({count - 1}, {count}), got "
                f"({index}, {count}): count from 0"
            )
        return cls(index, count)

    @property
    def is_last(self) -> bool:
        """Whether it gives the result."""
        return self.index == self.count - 1

    def shards(self, stage: Stage) -> range:
        """Which shards of a stage are this task's."""
        first, last = (
            k * stage.num_shards // self.count for k in (self.index, self.index + 1)
        )
        return range(first, last)

    def owner(self, stage: Stage, number: int) -> int:
        """The task that has a shard."""
        return ((number + 1) * self.count - 1) // stage.num_shards


class Values(Accumulator):
    """What later stages need. Results of shards are not put together in memory."""

    def put(self, shard: Shard, result: Sequence[Any]) -> None:
        pass

    def free(self, place: int) -> list[Value]:
        # A damaged result of any stage may have to be made again.
        return []


class ArrayJob:
    """What one task makes and reads.

    Args:
      cut_program: the plan.
      leaves: its arguments.
      task: which task.
      saved: the folder.
    """

    def __init__(
        self,
        cut_program: CutProgram,
        leaves: Sequence[Any],
        task: Task,
        saved: Checkpoint,
    ) -> None:
        self.cut_program, self.leaves = cut_program, leaves
        self.task, self.saved = task, saved
        self.values = Values(cut_program)
        self.stored: dict[Value, Stored] = {}
        self._told: set[tuple[int, int]] = set()

    def end_stage(self, stage: Stage) -> None:
        """Folds what is this task's to fold, and gives later stages their values."""
        nodes: dict[Value, dict[Box, Node]] = {r.value: {} for r in stage.results}
        folds = FoldTasks(self.cut_program, stage)
        for number in range(stage.num_shards):
            for place, box, combiner, value in written(stage, number):
                if combiner == "insert":
                    nodes[value][box] = ShardResult(stage, number, place)
            for each in folds.after(number):
                is_own = self.task.owner(stage, each.number) == self.task.index
                if is_own and not self.path(each).exists():
                    self.make(each)
                if each.is_top:
                    nodes[each.value][each.box] = each
        later = [each for each in self.cut_program.stages if each.number > stage.number]
        for result in stage.results:
            value = result.value
            stored = Stored(value, result.combiner, nodes[value], self.load)
            self.stored[value] = stored
            if any(value in each.reads for each in later):
                is_large = self.cut_program.is_large(value)
                self.values.kept[value] = stored if is_large else np.asarray(stored)

    def path(self, node: Node) -> pathlib.Path:
        return self.saved.folder.path / name_of(node)

    def load(self, node: Node) -> np.ndarray:
        """A result or a fold of some, as soon as it is there."""
        found = self.read(node)
        if found is None:
            self.wait(node)
            found = self.read(node)
        return self.make(node) if found is None else found

    def read(self, node: Node) -> np.ndarray | None:
        """What the folder has of a node, None if that is nothing or damaged."""
        if isinstance(node, ShardResult):
            shard = Shard(self.cut_program, node.stage, node.number)
            return self.saved.load_one(shard, node.place)
        part = stored_as(node.value, node.box)
        found = self.saved.results.load(node.name, [part])
        return None if found is None else found[0]

    def wait(self, node: Node) -> None:
        """Waits for the file of another task."""
        path, seconds = self.path(node), 0.01
        owner = self.task.owner(node.stage, node.number)
        while owner != self.task.index and not path.exists():
            if (node.stage.number, owner) not in self._told:
                self._told.add((node.stage.number, owner))
                print(
                    f"task {self.task.index} of {self.task.count} waits for task "
                    f"{owner}: {path} is not there yet",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST)

    def make(self, node: Node) -> np.ndarray:
        """Makes a file, also in place of a damaged one."""
        if isinstance(node, FoldTask):
            folded = node.run(map(self.load, node.needs))
            self.saved.results.save(node.name, [folded])
            return folded
        shard = Shard(self.cut_program, node.stage, node.number)
        args = self.cut_program.read(shard.recipe, self.leaves, self.values.kept)
        results = [np.asarray(part) for part in shard.function(*args)]
        self.saved.save(shard, results)
        return results[node.place]

    def put_into(self, acc: Accumulator) -> None:
        """Puts the function's results where they belong, when all is there."""
        graph = self.cut_program.graph
        outputs = {v: self.stored[v] for v in graph.outputs if isinstance(v, Value)}
        for stored in outputs.values():
            for node in stored.nodes.values():
                self.wait(node)
        for value, stored in outputs.items():
            for box, node in stored.nodes.items():
                put(acc.buffer(value), box, "insert", self.load(node))


def name_of(node: Node) -> str:
    """The file of a node."""
    if isinstance(node, FoldTask):
        return node.name
    return result_name(node.stage.number, node.number)


class Stored:
    """A value in files, read box by box.

    Args:
      value: which.
      combiner: how its parts were combined.
      nodes: where its boxes are.
      load: gives a node's array.
    """

    def __init__(
        self,
        value: Value,
        combiner: str,
        nodes: Mapping[Box, Node],
        load: Callable[[Node], np.ndarray],
    ) -> None:
        aval = data_aval(value.aval)
        self.shape, self.dtype, self.nodes = aval.shape, aval.dtype, nodes
        self._value, self._combiner, self._load = value, combiner, load
        self._boxes = list(nodes)
        self._bounds = np.asarray(self._boxes, np.int64)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        box = tuple(
            each.indices(size)[:2]
            for each, size in zip(index, self._value.shape, strict=True)
        )
        if box in self.nodes:
            return self._load(self.nodes[box])
        shape, dtype = stored_as(self._value, box)
        start = 0 if self._combiner == "insert" else identity(self._combiner, dtype)
        found = np.full(shape, start, dtype)
        for other in self._overlapping(box):
            here, there = [], []
            for (first, end), (start, stop) in zip(box, other, strict=True):
                both = max(first, start), min(end, stop)
                here.append(slice(both[0] - first, both[1] - first))
                there.append(slice(both[0] - start, both[1] - start))
            found[tuple(here)] = self._load(self.nodes[other])[tuple(there)]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(0, n) for n in self._value.shape)], dtype)

    def _overlapping(self, box: Box) -> list[Box]:
        if not self._boxes or not box:
            return []
        starts, stops = np.asarray(box).T
        meet = (self._bounds[:, :, 0] < stops) & (starts < self._bounds[:, :, 1])
        return [self._boxes[k] for k in np.flatnonzero(meet.all(1))]
