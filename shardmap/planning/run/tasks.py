"""The tasks of a stage: its shards, and folds of their partial results.

Partial results are combined in a tree, sixteen at a time, in the order of
the shards. The bytes are the same on every executor.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmap.planning.engine.monoids import Combiner, start, together
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.slices import Box
from shardmap.planning.engine.stages import Stage
from shardmap.planning.run.buffers import ARITY, Arrays, combined, depth
from shardmap.planning.run.cut_program import Spec, spec

Target: TypeAlias = tuple[Box, Combiner, Value]
"""The box of a value that a result is for, and how it is combined there."""

Need: TypeAlias = tuple["Task", tuple[int, ...]]
"""A task, and which of its results another one needs."""

Start: TypeAlias = tuple[Spec, np.ndarray]
"""The shape and dtype of an array, and the number that it is filled with."""


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
    def combiner(self) -> Combiner:
        """How a fold combines."""
        task, (place, *_) = self.needs[0]
        return task.writes[place][1]

    @property
    def starts(self) -> list[Start] | None:
        """The arrays of identities that the last fold of a box begins with."""
        if self.writes[0][1] != "insert":
            return None
        task, places = self.needs[0]
        combiners = [task.writes[place][1] for place in places]
        return [
            (each, start(combiner, each[1]))
            for combiner, each in zip(combiners, self.results, strict=True)
        ]

    @property
    def results(self) -> list[Spec]:
        """The shapes and dtypes of its results."""
        return [spec(value, box) for box, _, value in self.writes]


def run_fold(
    combiner: Combiner, starts: Sequence[Start] | None, parts: Iterable[Arrays]
) -> list[np.ndarray]:
    """Combines results from the first to the last, beginning with ``starts``."""
    if starts is not None:
        first = [np.full(shape, fill, dtype) for (shape, dtype), fill in starts]
        parts = itertools.chain([first], parts)
    numbered = enumerate(parts)
    _, total = next(numbered)
    for number, part in numbered:
        total = combined(combiner, total, part, may_write=number > 1)
    return list(total)


def shard_tasks(stage: Stage, numbers: Iterable[int]) -> Iterator[Task]:
    """The shards of a stage with these numbers."""
    for number in numbers:
        # Without a look at how the shard computes it.
        boxes = stage.boxes(*stage.shard(number))
        writes = tuple(targets(stage, boxes))
        yield Task(f"{stage.number}-{number}.bin", stage, number, writes)


def all_tasks(stage: Stage) -> Iterator[Task]:
    """The shards of a stage, then the folds of their results, each after its needs."""
    parts: dict[tuple[Target, ...], list[Need]] = {}
    for task in shard_tasks(stage, range(stage.num_shards)):
        yield task
        for places in together((how, value) for _, how, value in task.writes):
            writes = tuple(task.writes[place] for place in places)
            if writes[0][1] != "insert":
                parts.setdefault(writes, []).append((task, places))
    for number, (writes, needs) in enumerate(parts.items()):
        every = tuple(range(len(writes)))
        name = f"{writes[0][-1].number}-{number}"
        whole = tuple((box, "insert", value) for box, _, value in writes)
        for level in range(depth(len(needs)) + 1):
            is_top = len(needs) <= ARITY
            groups = [needs[k : k + ARITY] for k in range(0, len(needs), ARITY)]
            needs = []
            for k, group in enumerate(groups):
                if len(group) > 1 or is_top:
                    last, _ = group[-1]
                    fold = f"{name}-{level}-{k}.fold"
                    results = whole if is_top else writes
                    task = Task(fold, stage, last.number, results, tuple(group))
                    yield task
                    group = [(task, every)]
                needs += group


def targets(stage: Stage, boxes: Iterable[Box | None]) -> Iterator[Target]:
    """Yields where the results of a shard that writes these boxes go."""
    for result, box in zip(stage.results, boxes, strict=True):
        if box is not None:
            yield box, result.combiner, result.value
