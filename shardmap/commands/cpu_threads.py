"""The number of threads of jaxlib on CPU; it must be set before JAX starts.

A collective blocks a thread until all devices reach it. If runs are queued, as under a
`jax.jit`, blocked collectives can hold all threads while other devices need one.
"""

import os
from collections.abc import Mapping

# jaxlib reads the sizes of its thread pools from this environment variable.
VARIABLE = "NPROC"
ENOUGH = 64


def enough_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives jaxlib enough threads; empty if the user has set it.

    >>> enough_threads({"NPROC": "4"})
    {}
    >>> list(enough_threads({}))
    ['NPROC']
    """
    if VARIABLE in environment:
        return {}
    return {VARIABLE: str(max(ENOUGH, os.cpu_count() or 1))}


def has_enough_threads(environment: Mapping[str, str]) -> bool:
    """Whether jaxlib has threads for many collectives at a time.

    >>> has_enough_threads({"NPROC": "4"}), has_enough_threads({"NPROC": "64"})
    (False, True)
    """
    told = environment.get(VARIABLE, "")
    return told.isdecimal() and int(told) >= ENOUGH
