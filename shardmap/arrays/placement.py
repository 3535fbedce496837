"""Placing arrays on the devices of a map."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardmap._jax.types import AnyMesh, Aval, Value
from shardmap.arrays import array_likes
from shardmap.arrays.running import map_jit

# `jax.jit` itself gives each device its part of these.
_LEFT_TO_JIT = frozenset([np.ndarray, bool, int, float, complex])


def place(
    arrays: Sequence[Any],
    shardings: Sequence[Sharding] | None,
    uncommitted: bool = False,
) -> list[Any]:
    """Moves arrays, scalars and array-likes to shardings; None leaves them alone.

    Those that are sharded as wanted already are the same objects. What is not committed
    to devices, such as NumPy arrays, is left to `jax.jit`, but not if ``uncommitted``
    ones are moved too, nor among several processes.
    """
    if shardings is None:
        return list(arrays)
    # Among several processes `jax.jit` cuts nothing itself.
    uncommitted = uncommitted or jax.process_count() > 1
    return [
        device_put(array, sharding)
        if is_misplaced(array, sharding, uncommitted)
        else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def is_misplaced(array: Value, sharding: Sharding, uncommitted: bool) -> bool:
    """Whether ``array`` is not sharded as ``sharding`` says."""
    if has_no_bytes(array):
        return False
    if type(array) in _LEFT_TO_JIT:
        return uncommitted
    if not isinstance(array, jax.Array):
        return uncommitted or array_likes.is_array_like(array)
    if isinstance(array, jax.core.Tracer) or not (array.committed or uncommitted):
        return False
    return not _equivalent(array.sharding, sharding, array.ndim)


def memory_kind(aval: Aval) -> str | None:
    """The ``memory_kind`` of a sharding for an array; None for device memory."""
    on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    return "pinned_host" if on_host else None


def array_sharding(mesh: AnyMesh, spec: PartitionSpec, aval: Aval) -> NamedSharding:
    """The sharding of an array; tangents of integers are the same in all processes."""
    return NamedSharding(
        mesh,
        PartitionSpec() if has_no_bytes(aval) else spec,
        memory_kind=memory_kind(aval),
    )


def has_no_bytes(value: object) -> bool:
    """Whether a value is a tangent of integers: a NumPy array, on no device."""
    return getattr(value, "dtype", None) == jax.dtypes.float0


@functools.lru_cache(maxsize=4096)
def _equivalent(one: Sharding, other: Sharding, ndim: int) -> bool:
    return one.is_equivalent_to(other, ndim)


def device_put(value: Value, sharding: Sharding) -> jax.Array:
    """Copies a value, as for `place`, to where ``sharding`` says.

    A `jax.Array` that stays on its devices does not go through the host. If the devices
    are not all this process's, a value that is must be equal on all processes.
    """
    logging.getLogger("shardmap").debug(
        "shardmap: moved %s from %s to %s",
        array_likes.abstract_value(value).str_short(),
        getattr(value, "sharding", "the host"),
        sharding,
    )
    on_host = not isinstance(value, jax.Array)
    if on_host and array_likes.is_array_like(value):
        return array_likes.device_put_array_like(value, sharding)
    if not sharding.is_fully_addressable and (on_host or value.is_fully_addressable):
        # `jax.device_put` would compare the values of all processes, each time.
        kind = array_likes.abstract_value(value)
        if kind.weak_type and not kind.shape:
            # A Python scalar is equal on all devices, and an array of shards has no
            # weak type.
            return np.asarray(value).item()
        whole = np.asarray(value, kind.dtype)
        # Needed in a process without any of the devices.
        return jax.make_array_from_callback(
            kind.shape, sharding, lambda i: whole[i], dtype=kind.dtype
        )
    if on_host:
        return jax.device_put(value, sharding)
    if not value.is_fully_addressable:
        return _recut(sharding)(value)
    held, wanted = (
        array_likes.boxes(s, value.shape) for s in (value.sharding, sharding)
    )
    if list(held) == list(wanted) and not set(wanted.values()) <= set(held.values()):
        # `jax.device_put` would go through the host.
        return _recut(sharding)(value)
    return jax.device_put(value, sharding)


@functools.lru_cache(maxsize=1024)
def _recut(sharding: Sharding) -> Any:
    """A program that reshards an array on its devices."""
    devices = list(sharding.device_set)
    return map_jit(lambda x: x, devices, out_shardings=sharding)
