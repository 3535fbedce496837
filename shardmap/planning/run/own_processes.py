"""The processes of one run: they start with it, and end with it."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any


@contextlib.contextmanager
def own_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes.

    Raises:
      RuntimeError: none of them could start, or this process may start none.
    """
    # A new process imports the script that calls this: `multiprocessing` asks so too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)  # The process that started the worker tells why.
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            f"executor={count} starts processes, which a daemonic process, such as a "
            "worker of multiprocessing.Pool, may not: start that worker by "
            "concurrent.futures.ProcessPoolExecutor"
        )
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    try:
        with ProcessPoolExecutor(count, context, _start, (started,)) as pool:
            yield pool
    except RuntimeError as error:
        if isinstance(error.__cause__, BrokenExecutor) and not started.is_set():
            raise RuntimeError(
                f"no process of executor={count} could start. Each of them imports the "
                "script that runs here: put what the script does under "
                'if __name__ == "__main__":'
            ) from None
        raise


def _start(started: Any) -> None:
    """Called in each process before its first shard."""
    started.set()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, which may have been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
