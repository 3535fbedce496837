"""Process-local arrays, and the global arrays that they are parts of.

Conversion copies no buffers.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardmap._jax.types import Value
from shardmap.arrays import placement
from shardmap.arrays.processes import is_global_array
from shardmap.sharding.conversions import axes_in
from shardmap.sharding.mesh import local_mesh


class ProcessShardings(NamedTuple):
    """The shardings of a global array and of its process-local part.

    Attributes:
      local_sharding: of the part on this process, over its own devices.
      global_sharding: over the devices of all processes.
      axis: the mapped axis; None: the array is not mapped, and whole in each process.
      num_processes: how many have different elements, so many times longer the global
        array is along the axis.
      devices: how many devices of this process have a shard.
      is_copied: whether all of them have the same.
    """

    local_sharding: NamedSharding
    global_sharding: NamedSharding
    axis: int | None
    num_processes: int
    devices: int
    is_copied: bool

    def global_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._scaled(shape, operator.mul)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._scaled(shape, operator.floordiv)

    def _scaled(
        self, shape: Sequence[int], scale: Callable[[int, int], int]
    ) -> tuple[int, ...]:
        return tuple(
            scale(size, self.num_processes) if k == self.axis else size
            for k, size in enumerate(shape)
        )

    def shards(self, array: jax.Array) -> list[jax.Array]:
        """The shards of an array on the devices of this process."""
        if self.is_copied:  # `addressable_data` has one shard only.
            return [shard.data for shard in array.addressable_shards]
        return [array.addressable_data(k) for k in range(self.devices)]


@functools.lru_cache(maxsize=4096)
def shardings_along(
    sharding: NamedSharding, axis: int | None, num_processes: int
) -> ProcessShardings:
    """The shardings of a mapped array, by that of the global one."""
    local = NamedSharding(_local_mesh(sharding.mesh), sharding.spec)
    for dimension, entry in enumerate(sharding.spec):
        if dimension != axis and any(
            local.mesh.shape[name] < sharding.mesh.shape[name]
            for name in axes_in(entry)
        ):
            raise ValueError(
                f"a map inside cuts dimension {dimension} of an array between "
                "processes. Pass global arrays, or put the mesh axes of maps inside on "
                "the devices of one process."
            )
    devices = local.mesh.size
    is_copied = devices > 1 and local.is_fully_replicated
    return ProcessShardings(local, sharding, axis, num_processes, devices, is_copied)


_local_mesh = functools.lru_cache(maxsize=1024)(local_mesh)


def processes_along(mesh: Mesh, mesh_axes: Sequence[str]) -> int:
    """The number of processes along mesh axes."""
    local = _local_mesh(mesh)
    return math.prod(mesh.shape[name] // local.shape[name] for name in mesh_axes)


# Concrete arrays


def to_global(value: Value, shardings: ProcessShardings) -> Any:
    """The global array that a process-local array is a part of.

    A global array is resharded. A weakly typed scalar becomes a Python scalar, as
    arrays made of shards have no weak type.
    """
    if placement.has_no_bytes(value):
        return np.zeros(shardings.global_shape(value.shape), value.dtype)
    wanted = shardings.global_sharding
    if is_global_array(value):
        if placement.is_misplaced(value, wanted, True):
            return placement.device_put(value, wanted)
        return value
    if isinstance(value, bool | int | float | complex):
        return value
    if not value.shape and getattr(value, "weak_type", False):
        return value.item()
    if placement.is_misplaced(value, shardings.local_sharding, True):
        value = placement.device_put(value, shardings.local_sharding)
    return jax.make_array_from_single_device_arrays(
        shardings.global_shape(value.shape), wanted, shardings.shards(value)
    )


def to_local(array: jax.Array, shardings: ProcessShardings) -> Any:
    """The process-local part of a global array of that sharding."""
    shape = shardings.local_shape(array.shape)
    if placement.has_no_bytes(array):
        return np.zeros(shape, array.dtype)
    if not math.prod(shape):
        return jax.device_put(np.zeros(shape, array.dtype), shardings.local_sharding)
    return jax.make_array_from_single_device_arrays(
        shape, shardings.local_sharding, shardings.shards(array)
    )
