"""The axis of a map: its name, and the layout of its elements.

An axis of ``size`` elements is on ``devices`` devices, ``block`` elements on each, in
order; the last block may be partly empty. Each device vectorises ``batch_size``
elements of its block at a time.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.types import Value

UNNAMED = "_unnamed"
"""The axis name of maps without one; no collective can name it."""

REPLICAS = "_replicas"
"""The mesh axis along which a map's elements are replicated on spare devices."""


def axis_text(axis_name: Hashable) -> str:
    """An axis in the words of a message.

    >>> axis_text("i"), axis_text(UNNAMED)
    ("axis 'i'", 'an axis')
    """
    return "an axis" if axis_name == UNNAMED else f"axis {axis_name!r}"


@dataclasses.dataclass(frozen=True)
class AxisLayout:
    """How the elements of an axis run: devices x vectorised x steps.

    Attributes:
      name: the axis name in collectives.
      size: the number of elements.
      device_axes: the mesh axes whose devices share the elements, major to minor;
        empty if the program sees all elements at once.
      devices: how many devices these are, 1 if there are none.
      batch_size: how many elements a device vectorises at the most; None: its block.
      block: how many each device has, the last one perhaps fewer. By default as few as
        hold all elements.
      vectorized_name: the name of the vectorised axis while a block is traced.

    Example:
      >>> print(AxisLayout("i", 100, ("data",), 8, batch_size=4))
      8 devices x 4 vectorised x 4 steps
    """

    name: Hashable
    size: int
    device_axes: tuple[str, ...] = ()
    devices: int = 1
    batch_size: int | None = None
    block: int = -1
    vectorized_name: Hashable = None

    def __post_init__(self) -> None:
        if self.vectorized_name is None:
            object.__setattr__(self, "vectorized_name", f"block of {self.name!r}")
        if self.block == -1:
            block = self.size if self.devices == 1 else -(-self.size // self.devices)
            object.__setattr__(self, "block", block)

    def __str__(self) -> str:
        return (
            f"{self.devices:,} device{'s' * (self.devices != 1)} x "
            f"{self.vectorised:,} vectorised x "
            f"{self.steps:,} step{'s' * (self.steps != 1)}"
        )

    @property
    def vectorised(self) -> int:
        """How many elements of a block are one batched operation."""
        return min(self.batch_size or self.block, self.block)

    @property
    def steps(self) -> int:
        """How many such operations a device does, one after another."""
        return -(-self.block // (self.vectorised or 1))

    @property
    def padded_size(self) -> int:
        """How many elements there is room for."""
        return self.devices * self.block

    @property
    def padding(self) -> int:
        """How many places behind the last element are empty."""
        return self.padded_size - self.size

    def indices(self) -> jax.Array:
        """The positions along the whole axis of this device's elements."""
        local = jnp.arange(self.block, dtype=np.int32)
        if not self.device_axes:
            return local
        return lax.axis_index(self.device_axes) * self.block + local

    def mask_padding(self, block: Value, fill: Value) -> Any:
        """The block with ``fill`` in its empty places."""
        if not self.padding:
            return block
        present = jnp.expand_dims(self.indices() < self.size, range(1, block.ndim))
        # Not the number itself: the largest uint32 is no int32.
        return jnp.where(present, block, lax.full_like(block, fill))

    # This axis together with others, which are mesh axes or axes of maps around.

    def total(self, names: Sequence[Any]) -> int:
        """The number of elements along ``names``."""
        return math.prod(
            self.size if name == self.name else lax.axis_size(name) for name in names
        )

    def gather(self, block: Value, names: Sequence[Any]) -> Any:
        """All elements along ``names`` in front, on every device."""
        gathered, have_axis = block, False
        for name in reversed(names):
            if name == self.name:
                if self.device_axes:
                    gathered = lax.all_gather(gathered, self.device_axes, tiled=True)
                gathered, have_axis = gathered[: self.size], True
            else:
                front = 0 if have_axis else 1
                gathered = lax.all_gather(gathered, name, axis=front)
        return gathered.reshape(self.total(names), *block.shape[1:])

    def positions(self, names: Sequence[Any]) -> jax.Array:
        """The positions of this device's elements along ``names``."""
        position: Any = 0
        for name in names:
            if name == self.name:
                position = position * self.size + self.indices()
            else:
                position = position * lax.axis_size(name) + lax.axis_index(name)
        return jnp.minimum(position, self.total(names) - 1)

    def groups(
        self, names: Sequence[Any], groups: Sequence[Sequence[int]] | None
    ) -> tuple[Sequence[Sequence[int]], np.ndarray, np.ndarray]:
        """The groups, and for each position the number of its group and place in it.

        Without groups, all elements are one group.
        """
        total = self.total(names)
        groups = groups or [range(total)]
        number, place = np.zeros(total, np.int32), np.zeros(total, np.int32)
        for k, group in enumerate(groups):
            for where, position in enumerate(group):
                number[position], place[position] = k, where
        return groups, number, place


def pad_last(array: Value, count: int, axis: int) -> Any:
    """The array with ``count`` copies of its last element behind it.

    Copies are valid inputs of any function, also as random keys.
    """
    if not count:
        return array
    last = lax.slice_in_dim(array, array.shape[axis] - 1, None, axis=axis)
    return lax.concatenate([array, *[last] * count], axis)


def pad(operands: Sequence[Any], axes: Sequence[int | None], count: int) -> list[Any]:
    """Adds ``count`` elements to the mapped operands."""
    return [
        operand if axis is None else pad_last(operand, count, axis)
        for operand, axis in zip(operands, axes, strict=True)
    ]


def unpad(
    results: Sequence[Any], axes: Sequence[int | None], axis: AxisLayout
) -> list[Any]:
    """Removes the elements that `pad` has added."""
    return [
        result
        if out_axis is None
        else jax.lax.slice_in_dim(result, 0, axis.size, axis=out_axis)
        for result, out_axis in zip(results, axes, strict=True)
    ]
