"""Gives back memory that glibc keeps after it was freed.

That can be several times what a shard holds. Other C libraries have no such function.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 0.05
"""The least time between two calls, each of which takes a few milliseconds."""


@contextlib.contextmanager
def trimming(wanted: bool) -> Iterator[Callable[[], None]]:
    """Gives a function that trims, to call after each task, and trims at the end."""
    try:
        trim: Any = ctypes.CDLL(None).malloc_trim if wanted else None
    except (AttributeError, TypeError, OSError):
        trim = None
    if trim is None:
        yield lambda: None
        return
    last = time.monotonic()

    def after_task() -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS:
            trim(0)
            last = time.monotonic()

    yield after_task
    trim(0)
