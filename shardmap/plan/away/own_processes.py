"""The processes of one run: they start with it, and end with it."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any

from shardmap.plan.away.cores import take_share


@contextlib.contextmanager
def own_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes, each with its share of the machine.

    Raises:
      RuntimeError: none of them could start.
    """
    if _is_imported_by_worker():
        raise SystemExit(1)  # The process that started the worker tells why.
    context = multiprocessing.get_context("spawn")
    started = context.Value("i", 0)
    try:
        with ProcessPoolExecutor(
            count, context, initializer=_start, initargs=(started, count)
        ) as pool:
            yield pool
    except RuntimeError as error:
        if isinstance(error.__cause__, BrokenExecutor) and not started.value:
            raise RuntimeError(
                f"no process of executor={count} could start. Each of them imports the "
                "script that runs here: put what the script does under "
                'if __name__ == "__main__":'
            ) from None
        raise


def _is_imported_by_worker() -> bool:
    """Whether a new process is importing the script that calls this.

    `multiprocessing` asks itself the same before it starts a process.
    """
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _start(started: Any, count: int) -> None:
    """Called in each process before its first shard."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with started.get_lock():
        index = started.value
        started.value += 1
    # One that takes the place of another has the share of some other one.
    take_share(index % count, count)


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, which may have been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
