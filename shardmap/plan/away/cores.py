"""The share that one of several processes on a machine has of its cores and memory.

XLA sizes its pool of threads by the cores that a process may use when JAX starts, so
that N processes with all cores each have N times as many threads as there are cores.
Variables such as ``OMP_NUM_THREADS`` do not change that.
"""

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Sequence

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
USED = 0.9
"""The part of a GPU's memory that all processes get together."""


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


def take_share(index: int, count: int) -> None:
    """Keeps this process to its share. JAX must not have started yet."""
    if hasattr(os, "sched_setaffinity"):
        own = share_of(sorted(os.sched_getaffinity(0)), index, count)
        # Linux counts threads, and those that are there may be who starts JAX.
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, own)
    os.environ.setdefault(FRACTION, f"{USED / count:.3f}")


def where() -> tuple[str, int]:
    """The machine and process that this runs in."""
    return socket.gethostname(), os.getpid()


def take_share_of_all(index: int, count: int) -> bool:
    """As `take_share`, of a machine on which this process has all cores so far.

    Returns:
      Whether it took a share: it had all cores, and JAX had not started.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    if "jax" in sys.modules:  # Imported for the question, it would take seconds.
        context = importlib.import_module("shardmap._jax.context")
        if context.backends_are_started():
            return False
    if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        return False
    take_share(index, count)
    return True
