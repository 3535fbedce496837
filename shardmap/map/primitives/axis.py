"""What the axes of maps are called."""

from collections.abc import Hashable

UNNAMED = "_unnamed"
"""The axis name of maps that were given none; nothing can refer to it."""

REPLICAS = "_replicas"
"""The mesh axis of devices that do the same as others: spare ones, in a program that
needs them elsewhere."""


def axis_text(axis_name: Hashable) -> str:
    """What to call an axis in a sentence.

    >>> axis_text("i"), axis_text(UNNAMED)
    ("axis 'i'", 'an axis')
    """
    return "an axis" if axis_name == UNNAMED else f"axis {axis_name!r}"
