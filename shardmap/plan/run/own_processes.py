"""The processes of one run: they start with it, and end with it.

XLA sizes its pool of threads by the cores that a process may use when JAX starts, so
that N processes with all cores each have N times as many threads as there are cores.
Variables such as ``OMP_NUM_THREADS`` do not change that.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any

USED = 0.9
"""The part of a GPU's memory that all processes get together."""


@contextlib.contextmanager
def own_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes, each with its share of the machine.

    Raises:
      RuntimeError: none of them could start.
    """
    # A new process imports the script that calls this: `multiprocessing` asks so too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
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


def share_of(cores: Sequence[int], index: int, count: int) -> list[int]:
    """The cores of one of several processes; at least one.

    >>> share_of([0, 1, 2, 3, 8], 1, 2)
    [3, 8]
    >>> share_of([0, 1], 4, 5)
    [0]
    """
    if count > len(cores):
        return [cores[index % len(cores)]]
    bounds = [-(-k * len(cores) // count) for k in (index, index + 1)]
    return list(cores[slice(*bounds)])


def _start(started: Any, count: int) -> None:
    """Called in each process before its first shard, and before JAX starts."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with started.get_lock():
        # A process that replaces a dead one may get the share of another one.
        index = started.value % count
        started.value += 1
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share_of(sorted(os.sched_getaffinity(0)), index, count))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{USED / count:.3f}")


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, which may have been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
