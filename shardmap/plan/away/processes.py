"""Shards in other processes, by any executor of `concurrent.futures`."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import numpy as np

from shardmap.plan.away.groups import (
    Group,
    Task,
    TaskError,
    groups,
    level_of,
    run_group,
)
from shardmap.plan.away.tasks import Functions, Travels, run_task
from shardmap.plan.engine.keys import itemsize
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, volume
from shardmap.plan.run.buffers import FOLDED, start_dtype
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.workers import Saved, Workers, broke_down, failed

ROUNDS = 2
"""How often each place of an executor is to get work, if shards go in groups."""

SENT = 2**22
"""How many bytes go to and fro with a group at most, nodes of trees apart."""


class Elsewhere(Workers):
    """Sends exported functions, and where values are or else their bytes."""

    apart = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.functions = Functions()
        self.travels = Travels.of(
            self.cut_program, self.leaves, self.acc.given, self.keeps
        )

    def args(
        self, shard: Shard, known: dict[Any, np.ndarray] | None = None
    ) -> list[Any]:
        """What the function of a shard takes: where it is, or what it is."""
        known = {} if known is None else known
        found: list[Any] = []
        for value, box in shard.recipe.reads:
            read = self.travels.read(value, box)
            if read is None and (value, box) not in known:
                known[value, box] = self.held(value, box)
            found.append(read or known[value, box])
        starts = shard.recipe.starts
        return [*found, np.asarray(starts, start_dtype(starts))]

    def held(self, value: Value, box: Box) -> np.ndarray:
        """A box of what does not travel, read here."""
        kept = self.acc.kept
        return np.asarray(self.cut_program.read_one(value, box, self.leaves, kept))

    def submit(self, shard: Shard) -> Future[Any]:
        writes = [self.travels.write(*write) for write in shard.writes()]
        blob = self.functions.of(shard)
        return self.executor.submit(run_task, blob, self.args(shard), writes)

    def run_stage(
        self, shards: Sequence[Shard], ahead: int, retries: int, saved: Saved | None
    ) -> Iterator[Shard]:
        level = 0 if saved else level_of(len(shards), ROUNDS * ahead)
        if not level:
            yield from super().run_stage(shards, ahead, retries, saved)
            return
        most = len(shards) // (ROUNDS * ahead)
        found = groups(shards, self._keys, self._total, _bytes, level, most)
        made = itertools.chain.from_iterable(map(self._sendable, found))
        waiting: deque[tuple[Group, Future[Any] | None]] = deque()
        try:
            while True:
                for group in itertools.islice(made, ahead - len(waiting)):
                    waiting.append((group, self._sent(group, retries)))
                if not waiting:
                    return
                group, future = waiting.popleft()
                self._put(group, future, retries)
                del future
                yield from group.items
        finally:
            for _, future in waiting:
                if future is not None:
                    future.cancel()

    def _sendable(self, group: Group) -> Iterator[Group]:
        """A group, or its shards alone if much would be sent at once."""
        sent = {
            (value, box)
            for shard in group.items
            for value, box in shard.recipe.reads
            if self.travels.read(value, box) is None
        }
        sent |= {
            (value, box)
            for shard in group.items
            for box, combiner, value in shard.writes()
            if combiner == "insert" and not self.travels.write(box, combiner, value)
        }
        if not group.level or sum(map(_bytes, sent)) <= SENT:
            yield group
            return
        for shard in group.items:
            yield Group([shard], {}, 0)

    def _sent(self, group: Group, retries: int) -> Future[Any] | None:
        """What a group gives; None if what is read here could not be."""
        if not group.level:
            return self._submitted(group.items[0])
        places = {key: k for k, key in enumerate(group.parts)}
        trees = [(combiner, count) for (*_, combiner), count in group.parts.items()]
        known: dict[Any, np.ndarray] = {}
        tasks = []
        try:
            for shard in group.items:
                writes = list(shard.writes())
                sinks = [self.travels.write(*write) for write in writes]
                folds = [places.get((v, box, combiner)) for box, combiner, v in writes]
                args = self.args(shard, known)
                tasks.append(Task(self.functions.of(shard), args, sinks, folds))
            return self.executor.submit(run_group, tasks, trees, group.level, retries)
        except Exception:
            return None

    def _put(self, group: Group, future: Future[Any] | None, retries: int) -> None:
        if future is None or not group.level:
            for shard in group.items:
                future = future or self._submitted(shard)
                self.acc.put(shard, self.tried(shard, future, retries))
                future = None
            return
        try:
            rest, nodes = future.result()
        except BrokenExecutor as error:
            raise broke_down(group.items[0], error) from error
        except TaskError as error:
            # With what it was there, which the executor tells of the outer one.
            error.error.__cause__ = error.__cause__
            shard = group.items[error.place]
            raise failed(shard, error.attempts, error.error) from error.error
        for shard, results in zip(group.items, rest, strict=True):
            self.acc.put(shard, results)
        for (key, count), made in zip(group.parts.items(), nodes, strict=True):
            for node in made:
                value, box, _ = key
                covers = min(FOLDED**group.level, count)
                self.acc.put_together(value, box, node, group.level, covers)
                count -= covers

    def _total(self, key: tuple[Value, Box, str]) -> int:
        return self.cut_program.parts[key[0]]

    def _keys(self, shard: Shard) -> list[tuple[Value, Box, str]]:
        """The boxes that have many partial results, of which this shard has one."""
        return [
            (value, box, combiner)
            for box, combiner, value in shard.writes()
            if combiner != "insert" and self.cut_program.parts[value] > FOLDED
        ]


def _bytes(key: tuple[Any, ...]) -> int:
    """Those of a box, which is the second after its value."""
    value, box, *_ = key
    return volume(box) * itemsize(value.aval)
