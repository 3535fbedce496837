"""The tasks of a stage: its shards, and folds of their partial results.

Partial results are combined in a tree, sixteen at a time, in the order of
the shards. The bytes are the same on every executor.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmap.arrays.combining import identity
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.slices import Box
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.buffers import ARITY, Fold, fold
from shardmap.planning.run.cut_program import CutProgram, Spec, spec

Target: TypeAlias = tuple[Box, str, Value]
"""The box of a value that a result is for, and how it is combined there."""

Need: TypeAlias = tuple["Task", int]
"""A task, and which of its results another one needs."""


class Task(NamedTuple):
    """A shard, or a fold of at most 16 partial results.

    Attributes:
      name: its name in the plan.
      stage: its stage.
      number: the number of the shard; for a fold, of the last shard below it.
      writes: where its results go.
      needs: the results that a fold combines; none for a shard.
    """

    name: str
    stage: Stage
    number: int
    writes: tuple[Target, ...]
    needs: tuple[Need, ...] = ()

    @property
    def combiner(self) -> str:
        """How a fold combines."""
        task, place = self.needs[0]
        return task.writes[place][1]

    @property
    def start(self) -> Spec | None:
        """The array of identities that the last fold of a box begins with."""
        box, combiner, value = self.writes[0]
        return spec(value, box) if combiner == "insert" else None

    @property
    def results(self) -> list[Spec]:
        """The shapes and dtypes of its results."""
        return [spec(value, box) for box, _, value in self.writes]


def run_fold(combiner: str, start: Spec | None, parts: Iterable[Any]) -> np.ndarray:
    """Combines arrays from the first to the last, beginning with ``start``."""
    if start is not None:
        shape, dtype = start
        first = np.full(shape, identity(combiner, dtype), dtype)
        parts = itertools.chain([first], parts)
    return fold(combiner, parts)


def shard_tasks(stage: Stage, numbers: Iterable[int]) -> Iterator[Task]:
    """The shards of a stage with these numbers."""
    for number in numbers:
        family, index = stage.index(number)
        pieces = {k: stage.loops[k].pieces[piece] for k, piece in index.items()}
        # Without a look at how the shard computes it.
        boxes = stage.boxes(pieces, stage.written(family, index))
        writes = tuple(targets(stage, boxes))
        yield Task(f"{stage.number}-{number}.bin", stage, number, writes)


def all_tasks(cut_program: CutProgram, stage: Stage) -> Iterator[Task]:
    """The shards of a stage and the folds of their results, each after its needs."""
    trees: dict[tuple[Value, Box], _Tree] = {}
    for task in shard_tasks(stage, range(stage.num_shards)):
        yield task
        for place, (box, combiner, value) in enumerate(task.writes):
            if combiner != "insert":
                if (value, box) not in trees:
                    name = f"{value.number}-{len(trees)}"
                    count = cut_program.parts[value]
                    trees[value, box] = _Tree(name, task.writes[place], count)
                yield from trees[value, box].add((task, place))


def targets(stage: Stage, boxes: Iterable[Box | None]) -> Iterator[Target]:
    """Yields where the results of a shard that writes these boxes go."""
    for result, box in zip(stage.results, boxes, strict=True):
        if box is not None:
            yield box, result.combiner, result.value


class _Tree:
    """The folds of one box, in which ``count`` partial results come together."""

    def __init__(self, name: str, write: Target, count: int) -> None:
        self._name, self._write = name, write
        self._tasks: list[Task] = []
        self._tops: list[Need] = []
        self._numbers = itertools.count()
        self._fold = Fold(write[1], count, combine=self._combine, at_once=ARITY)

    def add(self, part: Need) -> list[Task]:
        """The folds that can run after one more partial result."""
        self._tasks = []
        top = self._fold.add(part)
        if top is not None:
            self._tops.append(top)
        if not self._fold.left:
            self._combine("insert", self._tops)
        return self._tasks

    def _combine(
        self, combiner: str, needs: Sequence[Need], may_write: bool = False
    ) -> Need:
        box, _, value = self._write
        last, _ = needs[-1]
        name = f"{self._name}-{next(self._numbers)}.fold"
        writes = ((box, combiner, value),)
        task = Task(name, last.stage, last.number, writes, tuple(needs))
        self._tasks.append(task)
        return task, 0
