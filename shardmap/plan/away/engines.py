"""Which engine runs the shards, by the executor that was given."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from shardmap.plan.away.dask import Dask, is_client
from shardmap.plan.away.own_processes import own_processes
from shardmap.plan.away.processes import Elsewhere, RayExecutor, is_ray
from shardmap.plan.run.workers import Here, InThreads, Workers


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
            yield Here, pool
    elif isinstance(executor, int) and not isinstance(executor, bool) and executor > 0:
        with own_processes(executor) as processes:
            yield Elsewhere, processes
    elif isinstance(executor, ThreadPoolExecutor):
        yield InThreads, executor
    elif is_client(executor):
        yield Dask, executor
    elif is_ray(executor):
        yield Elsewhere, RayExecutor(executor)
    elif isinstance(executor, Executor):
        yield Elsewhere, executor
    else:
        raise TypeError(
            "executor must be None, a number of processes, a "
            "concurrent.futures.Executor or a distributed.Client, got "
            f"{executor!r} of type {type(executor).__name__}"
        )
