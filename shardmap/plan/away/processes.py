"""Shards in other processes, by any executor of `concurrent.futures`, or by Ray."""

import types
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np

from shardmap.plan.away.travels import Travels, exported, run_task
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box
from shardmap.plan.run.buffers import start_dtype
from shardmap.plan.run.shards import Shard
from shardmap.plan.run.tasks import Task
from shardmap.plan.run.workers import Workers


class Elsewhere(Workers):
    """Sends exported functions, and of each box its place or its bytes."""

    apart = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blobs: dict[jax.stages.Wrapped, bytes] = {}
        self.travels = Travels.of(
            self.cut_program, self.leaves, self.acc.given, self.keeps
        )

    def function(self, shard: Shard) -> Any:
        """The exported function of a shard, or what stands for it."""
        if shard.function not in self.blobs:
            self.blobs[shard.function] = exported(shard)
        return self.blobs[shard.function]

    def arg(self, value: Value, box: Box) -> Any:
        """A box for a shard: where it is, or its array."""
        return self.travels.read(value, box) or self.held(value, box)

    def held(self, value: Value, box: Box) -> np.ndarray:
        """A box that is read here and sent."""
        kept = self.acc.kept
        return np.asarray(self.cut_program.read_one(value, box, self.leaves, kept))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Starts a function, and gives its future."""
        future: Future[Any] = self.executor.submit(function, *args)
        return future

    def submit(self, task: Task) -> Any:
        shard = self.shard(task)
        starts = shard.recipe.starts
        args = [self.arg(value, box) for value, box in shard.recipe.reads]
        args.append(np.asarray(starts, start_dtype(starts)))
        writes = [self.travels.write(*write) for write in task.writes]
        return self.call(run_task, self.function(shard), args, writes)


class RayExecutor(Executor):
    """Tasks of Ray, as an executor.

    Args:
      ray: the module, of which `ray.init` has been called.
    """

    def __init__(self, ray: Any) -> None:
        self._call = ray.remote(_call)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kw: Any) -> Future[Any]:
        found: Future[Any] = self._call.remote(fn, args, kw).future()
        return found


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def is_ray(executor: Any) -> bool:
    return isinstance(executor, types.ModuleType) and executor.__name__ == "ray"
