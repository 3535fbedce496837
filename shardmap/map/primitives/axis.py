"""The axis of a map: what it is called, and how its elements run."""

import dataclasses
from collections.abc import Hashable
from typing import Any

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


def map_text(params: dict[str, Any]) -> str:
    """What to call a map in a sentence, by the parameters of its equation.

    >>> map_text({"name": "step"})
    'spmap of step'
    """
    return f"spmap of {params['name']}"


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the elements of an axis run: devices x vectorised x steps.

    Attributes:
      size: the number of elements.
      devices: how many devices share them, 1 for one program.
      block: how many each device has; the last one has perhaps fewer.
      vectorised: how many of a block are one batched operation.
      steps: how many such operations a device does, one after another.
    """

    size: int
    devices: int
    block: int
    vectorised: int
    steps: int

    @classmethod
    def of(cls, size: int, devices: int, batch_size: int | None = None) -> "Spread":
        """How ``size`` elements run; ``batch_size`` is how many at once, at the most.

        >>> print(Spread.of(100, 8, batch_size=4))
        8 devices x 4 vectorised x 4 steps
        """
        block = -(-size // devices)
        vectorised = min(batch_size or block, block)
        return cls(size, devices, block, vectorised, -(-block // (vectorised or 1)))

    @property
    def places(self) -> int:
        """How many elements there is room for."""
        return self.devices * self.block

    def __str__(self) -> str:
        return (
            f"{self.devices:,} device{'s' * (self.devices != 1)} x "
            f"{self.vectorised:,} vectorised x "
            f"{self.steps:,} step{'s' * (self.steps != 1)}"
        )
