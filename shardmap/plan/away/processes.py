"""Shards in other processes, by any executor of `concurrent.futures`."""

from concurrent.futures import Future
from typing import Any

import numpy as np

from shardmap.plan.away.tasks import Functions, Travels, run_task
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box
from shardmap.plan.run.buffers import start_dtype
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.workers import Workers


class Elsewhere(Workers):
    """Sends exported functions, and where values are or else their bytes."""

    apart = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.functions = Functions()
        self.travels = Travels.of(
            self.cut_program, self.leaves, self.acc.given, self.keeps
        )

    def arg(self, value: Value, box: Box) -> Any:
        """A box for a shard: where it is, or what it is."""
        return self.travels.read(value, box) or self.held(value, box)

    def args(self, shard: Shard) -> list[Any]:
        """What the function of a shard takes."""
        starts = shard.recipe.starts
        found = [self.arg(value, box) for value, box in shard.recipe.reads]
        return [*found, np.asarray(starts, start_dtype(starts))]

    def held(self, value: Value, box: Box) -> np.ndarray:
        """A box of what does not travel, read here."""
        kept = self.acc.kept
        return np.asarray(self.cut_program.read_one(value, box, self.leaves, kept))

    def submit(self, shard: Shard) -> Any:
        writes = [self.travels.write(*write) for write in shard.writes()]
        blob = self.functions.of(shard)
        future: Future[Any] = self.executor.submit(
            run_task, blob, self.args(shard), writes
        )
        return future
