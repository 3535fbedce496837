"""What a plan is told of primitives of rooms that it does not import.

A map registers its own here. A plan that meets such a primitive was given a function
that binds it, so its room is there.
"""

from collections.abc import Callable
from typing import Any, Protocol


class Collective(Protocol):
    """What a plan asks of a collective; see `shardmap.map.collectives.table`."""

    @property
    def combiner(self) -> str | None: ...

    @property
    def is_elementwise(self) -> bool: ...

    @property
    def is_reduction(self) -> bool: ...


COLLECTIVES: dict[Any, Collective] = {}
"""The collectives over mapped axes."""

REWRITES: dict[Any, Callable[[Any, Any], Any]] = {}
"""Primitives, and functions that add what replaces their nodes to a plan's graph."""
