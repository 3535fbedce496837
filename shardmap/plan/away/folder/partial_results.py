"""Partial results that a task puts together, so that whoever ends a stage reads few.

The trees are those of a run here (`shardmap.plan.run.buffers.Fold`), and a task makes
the nodes of them that have all their parts in its unit of work.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmap.plan.away.folder.job import Job, Row
from shardmap.plan.run.buffers import FOLDED, Fold

Key: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]
"""What a partial result is one of: the number of a value, and a box of it."""


class PartialResult(NamedTuple):
    """Where a partial result goes.

    Attributes:
      key: its tree.
      level: that of the node.
      is_last: whether the node is whole with it.
    """

    key: Key
    level: int
    is_last: bool


def parts_of(rows: Sequence[Row]) -> list[list[PartialResult | None]]:
    """For each result of the shards of a unit where it goes; None: it is no part."""
    end = {
        _key(write): write[3] + 1
        for row in rows
        for write in row.writes
        if write[3] is not None
    }
    nodes: dict[Key, tuple[int, int]] = {}
    found = []
    for row in rows:
        own: list[PartialResult | None] = []
        for write in row.writes:
            key, place = _key(write), write[3]
            if place is None:
                own.append(None)
                continue
            if key not in nodes:
                level = _level(place, end[key])
                nodes[key] = level, place + FOLDED**level
            level, after = nodes[key]
            own.append(PartialResult(key, level, place + 1 == after))
            if place + 1 == after:
                del nodes[key]
        found.append(own)
    return found


def _key(write: tuple[int, Any, str, int | None]) -> Key:
    return write[0], tuple((begin, end) for begin, end in write[1])


def _level(place: int, end: int) -> int:
    """The level of the largest node that begins at a part and ends by another."""
    level = 0
    while place % FOLDED ** (level + 1) == 0 and place + FOLDED ** (level + 1) <= end:
        level += 1
    return level


def file_name(stage: int, unit: int) -> str:
    """Where a unit's nodes are."""
    return f"{stage}-{unit}.nodes"


class PartialResults:
    """What the partial results of one unit of a stage make.

    Args:
      job: the saved plan.
      stage, unit: which.
      kept: gives what a shard has kept, and runs it if that is nothing.

    Attributes:
      rows: the shards of the unit.
    """

    def __init__(
        self,
        job: Job,
        stage: int,
        unit: int,
        kept: Callable[[Row], Sequence[np.ndarray]],
    ) -> None:
        self._job, self._kept, self._name = job, kept, file_name(stage, unit)
        self._makes = job.stages[stage]["makes"]
        self.rows = list(job.rows(stage, unit))
        self._parts = parts_of(self.rows)
        last = [p for own in self._parts for p in own if p is not None and p.is_last]
        self._has_nodes = bool(last)
        self._shapes = [job.part(*part.key) for part in last if part.level]

    def run(self) -> None:
        """Runs the shards that have not been run, and puts their results together."""
        made = [node for part, node in self._made() if part.level]
        if made:
            self._job.results.save(self._name, made)

    def load(self) -> Iterator[tuple[PartialResult, np.ndarray]]:
        """Each node in its order, and the last part of it."""
        if not self._has_nodes:
            return
        nodes = None
        if self._shapes:
            nodes = self._job.results.load(self._name, self._shapes)
        if nodes is None:
            yield from self._made()
            return
        left = iter(nodes)
        for row, own in zip(self.rows, self._parts, strict=True):
            alone = any(part is not None and not part.level for part in own)
            arrays = self._kept(row) if alone else [None] * len(own)
            for part, array in zip(own, arrays, strict=True):
                if part is not None and part.is_last:
                    yield part, next(left) if array is None or part.level else array

    def _made(self) -> Iterator[tuple[PartialResult, np.ndarray]]:
        folds: dict[Key, Fold] = {}
        for row, own in zip(self.rows, self._parts, strict=True):
            for part, array in zip(own, self._kept(row), strict=True):
                if part is None:
                    continue
                combiner, _ = self._makes[str(part.key[0])]
                new = Fold(combiner, FOLDED**part.level, part.level)
                node = folds.setdefault(part.key, new).add(array)
                if node is not None:
                    del folds[part.key]
                    yield part, node
