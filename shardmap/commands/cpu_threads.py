"""How many threads jaxlib has on CPU, which has to be said before JAX starts.

A collective keeps its thread until all devices have come to it. Where runs are queued
under a `jax.jit` of the user's own, as many threads as there are cores can all be kept
by collectives that wait for devices without one, for ever.
"""

import os
from collections.abc import Mapping

# jaxlib sizes its pools by this; it has no name for it but this variable's.
VARIABLE = "NPROC"
ENOUGH = 64


def enough_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives jaxlib enough threads; none if the user has set it.

    >>> enough_threads({"NPROC": "4"})
    {}
    >>> list(enough_threads({}))
    ['NPROC']
    """
    if VARIABLE in environment:
        return {}
    return {VARIABLE: str(max(ENOUGH, os.cpu_count() or 1))}


def has_enough_threads(environment: Mapping[str, str]) -> bool:
    """Whether jaxlib is told to have threads for many collectives at a time.

    >>> has_enough_threads({"NPROC": "4"}), has_enough_threads({"NPROC": "64"})
    (False, True)
    """
    told = environment.get(VARIABLE, "")
    return told.isdecimal() and int(told) >= ENOUGH
