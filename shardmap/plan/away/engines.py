"""Which engine runs the shards, by the executor that was given."""

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from shardmap.plan.away.processes import Elsewhere
from shardmap.plan.run.workers import Engine, Here, Threads, Work


def engine_of(executor: Any) -> Engine:
    """The engine for what was given as ``executor``.

    Raises:
      TypeError: nothing that runs shards.
    """
    if executor is None:
        return _here
    if isinstance(executor, ThreadPoolExecutor):
        return functools.partial(_by, Threads, executor)
    if isinstance(executor, Executor):
        return functools.partial(_by, Elsewhere, executor)
    raise TypeError(
        "executor must be None or a concurrent.futures.Executor, such as "
        f"concurrent.futures.ThreadPoolExecutor(4), but got {executor!r}"
    )


@contextlib.contextmanager
def _here(*args: Any) -> Iterator[Work]:
    cut_program, leaves, acc, keeps = args
    with ThreadPoolExecutor(1) as pool:
        yield Here(cut_program, leaves, acc, pool, keeps)


@contextlib.contextmanager
def _by(kind: type[Work], executor: Any, *args: Any) -> Iterator[Work]:
    cut_program, leaves, acc, keeps = args
    yield kind(cut_program, leaves, acc, executor, keeps)
