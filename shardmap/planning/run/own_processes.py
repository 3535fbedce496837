"""The processes of one run: they start with it, and end with it."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor


@contextlib.contextmanager
def own_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes.

    Raises:
      RuntimeError: this process may start none.
    """
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            f"executor={count} starts processes, which a daemonic process, such as a "
            "worker of multiprocessing.Pool, may not: start that worker by "
            "concurrent.futures.ProcessPoolExecutor"
        )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _start) as pool:
        yield pool


def _start() -> None:
    """Called in each process before its first shard."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, which may have been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
