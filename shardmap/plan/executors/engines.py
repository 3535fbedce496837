"""Which engine runs the shards, by the executor that was given."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from shardmap.plan.executors.dask import DaskWorkers, is_client
from shardmap.plan.executors.own_processes import own_processes
from shardmap.plan.executors.processes import ProcessWorkers, RayExecutor, is_ray
from shardmap.plan.run.workers import LocalWorkers, ThreadWorkers, Workers


@contextlib.contextmanager
def engine_of(executor: Any, readers: int = 1) -> Iterator[tuple[type[Workers], Any]]:
    """The engine for what was given as ``executor``, and the executor that it uses.

    Args:
      executor: what was given.
      readers: how many threads read where there is none.

    Raises:
      TypeError: nothing that runs shards.
    """
    if executor is None:
        with ThreadPoolExecutor(readers) as pool:
            yield LocalWorkers, pool
    elif isinstance(executor, int) and not isinstance(executor, bool) and executor > 0:
        with own_processes(executor) as processes:
            yield ProcessWorkers, processes
    elif isinstance(executor, ThreadPoolExecutor):
        yield ThreadWorkers, executor
    elif is_client(executor):
        yield DaskWorkers, executor
    elif is_ray(executor):
        yield ProcessWorkers, RayExecutor(executor)
    elif isinstance(executor, Executor):
        yield ProcessWorkers, executor
    else:
        raise TypeError(
            "executor must be None, a number of processes, a "
            "concurrent.futures.Executor or a distributed.Client, got "
            f"{executor!r} of type {type(executor).__name__}"
        )
