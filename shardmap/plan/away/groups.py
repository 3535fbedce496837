"""Shards that go to another process together, so that it puts their parts together.

A pool of processes gives every result back to who asked, and so whoever is asked for
sixteen shards whose partial results make one gives back one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardmap.plan.away.tasks import Arg, Write, run_task
from shardmap.plan.run.buffers import FOLDED, Fold

Key: TypeAlias = Any
"""What a partial result is one of: a value, and a box of it."""


class Group(NamedTuple):
    """Shards that one process runs, one after the other.

    Attributes:
      items: the shards.
      parts: of each box of which they have partial results, how many.
      level: the level of the nodes that these make, 0 if they are not put together.
    """

    items: list[Any]
    parts: Mapping[Key, int]
    level: int


def level_of(count: int, groups: int) -> int:
    """The highest level whose nodes leave so many groups of that many shards.

    >>> level_of(100, 8), level_of(1000, 8), level_of(100_000, 8)
    (0, 1, 3)
    """
    level = 0
    while FOLDED ** (level + 1) * groups <= count:
        level += 1
    return level


def groups(
    items: Iterable[Any],
    keys: Callable[[Any], Sequence[Key]],
    total: Callable[[Key], int],
    weight: Callable[[Key], int],
    level: int,
    most: int,
) -> Iterator[Group]:
    """Groups of shards that follow each other and make whole nodes of their trees.

    The largest parts decide where a group ends. Smaller ones that make no whole nodes
    there are not put together.

    Args:
      items: the shards, in their order.
      keys: of which boxes a shard has partial results that may be put together.
      total: how many of these a box has.
      weight: how large one is.
      level: that of the nodes, at least 1.
      most: how many shards a group has at most; those that make no whole nodes are
        groups of their own.
    """
    size = FOLDED**level
    seen: Counter[Key] = Counter()
    waiting: list[Any] = []
    parts: Counter[Key] = Counter()

    def is_whole(key: Key) -> bool:
        begins = (seen[key] - parts[key]) % size == 0
        return begins and (seen[key] % size == 0 or seen[key] == total(key))

    def made() -> Iterator[Group]:
        whole = {key: count for key, count in parts.items() if is_whole(key)}
        if whole:
            yield Group([*waiting], whole, level)
        else:
            yield from (Group([each], {}, 0) for each in waiting)
        waiting.clear()
        parts.clear()

    for item in items:
        waiting.append(item)
        parts.update(keys(item))
        seen.update(keys(item))
        heaviest = max(map(weight, parts), default=0)
        if len(waiting) >= most or all(
            is_whole(key) for key in parts if weight(key) == heaviest
        ):
            yield from made()
    yield from made()


class Task(NamedTuple):
    """One shard of a group, as another process gets it.

    Attributes:
      blob: its function.
      args: what that takes.
      writes: which results it writes.
      folds: of each result, the number of the tree that it is a part of, if any.
    """

    blob: bytes
    args: Sequence[Arg]
    writes: Sequence[Write | None]
    folds: Sequence[int | None]


class TaskError(RuntimeError):
    """A shard of a group failed for good.

    Args:
      place: which.
      attempts: how often it was tried.
      error: the last error.
    """

    def __init__(self, place: int, attempts: int, error: Exception) -> None:
        super().__init__(place, attempts, error)
        self.place, self.attempts, self.error = place, attempts, error


def run_group(
    tasks: Sequence[Task],
    trees: Sequence[tuple[str, int]],
    level: int,
    retries: int,
) -> tuple[list[list[np.ndarray | None]], list[list[np.ndarray]]]:
    """Runs shards, and puts together what belongs together.

    Args:
      tasks: the shards.
      trees: for each box of partial results, how they are combined and their number.
      level: that of the nodes to be made.
      retries: how often a shard that fails is tried again.

    Returns:
      For each shard the results that are not written and no parts, and for each box
      its nodes.
    """
    folds = [Fold(combiner, count, level) for combiner, count in trees]
    nodes: list[list[np.ndarray]] = [[] for _ in trees]
    rest = []
    for place, task in enumerate(tasks):
        results = _tried(place, task, retries)
        for k, number in enumerate(task.folds):
            part = results[k]
            if number is not None and part is not None:
                node = folds[number].add(part)
                nodes[number] += [] if node is None else [node]
                results[k] = None
        rest.append(results)
    return rest, nodes


def _tried(place: int, task: Task, retries: int) -> list[np.ndarray | None]:
    for attempt in range(1, retries + 2):
        try:
            return run_task(task.blob, task.args, task.writes)
        except Exception as error:
            if attempt > retries:
                raise TaskError(place, attempt, error) from error
    raise AssertionError
