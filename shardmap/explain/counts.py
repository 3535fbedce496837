"""How often something runs, where it may be unknown: None."""

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def times(count: int | None, other: int | None) -> int | None:
    """How often the inside of a loop runs that is itself run ``count`` times.

    >>> times(3, 4), times(3, None)
    (12, None)
    """
    return None if count is None or other is None else count * other


def total(counts: Sequence[Number | None]) -> Number | None:
    """The sum; None if one of the numbers is not known.

    >>> total([3, 4]), total([3, None])
    (7, None)
    """
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
