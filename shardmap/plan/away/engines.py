"""Which engine runs the shards, by the executor that was given."""

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from shardmap.plan.away.dask import Dask, is_client
from shardmap.plan.away.own_processes import own_processes
from shardmap.plan.away.processes import Elsewhere, RayExecutor, is_ray
from shardmap.plan.run.workers import Engine, Here, InThreads, Workers


def engine_of(executor: Any, readers: int = 1) -> Engine:
    """The engine for what was given as ``executor``.

    Args:
      executor: what was given.
      readers: how many threads read where there is none.

    Raises:
      TypeError: nothing that runs shards.
    """
    if executor is None:
        return functools.partial(_here, readers)
    if isinstance(executor, int) and not isinstance(executor, bool) and executor > 0:
        return functools.partial(_own_processes, executor)
    if isinstance(executor, ThreadPoolExecutor):
        return functools.partial(_by, InThreads, executor)
    if is_client(executor):
        return functools.partial(_by, Dask, executor)
    if is_ray(executor):
        executor = RayExecutor(executor)
    if isinstance(executor, Executor):
        return functools.partial(_by, Elsewhere, executor)
    raise TypeError(
        "executor must be None, a number of processes, a concurrent.futures.Executor "
        f"or a distributed.Client, got {executor!r} of type {type(executor).__name__}"
    )


@contextlib.contextmanager
def _here(readers: int, *args: Any) -> Iterator[Workers]:
    with ThreadPoolExecutor(readers) as pool:
        yield Here(pool, *args)


@contextlib.contextmanager
def _by(kind: type[Workers], executor: Any, *args: Any) -> Iterator[Workers]:
    yield kind(executor, *args)


@contextlib.contextmanager
def _own_processes(count: int, *args: Any) -> Iterator[Workers]:
    with own_processes(count) as pool:
        yield Elsewhere(pool, *args)
