"""Arrays onto the devices where a map wants them."""

from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Sharding


def place(
    arrays: Sequence[Any],
    shardings: Sequence[Sharding] | None,
    uncommitted: bool = False,
) -> list[Any]:
    """Lays out arrays as a map wants them.

    Args:
      arrays: arrays and scalars.
      shardings: one for each; None leaves all of them alone.
      uncommitted: also those that are not committed to devices, such as NumPy arrays,
        instead of leaving them to `jax.jit`.

    Returns:
      The arrays; those that lie as wanted already are the same objects.
    """
    if shardings is None:
        return list(arrays)
    return [
        move(array, sharding) if is_misplaced(array, sharding, uncommitted) else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def is_misplaced(array: Any, sharding: Sharding, uncommitted: bool) -> bool:
    """Whether ``array`` does not lie as ``sharding`` says."""
    if not isinstance(array, jax.Array):
        return uncommitted
    if isinstance(array, jax.core.Tracer) or not (array.committed or uncommitted):
        return False
    return not array.sharding.is_equivalent_to(sharding, array.ndim)


def move(array: Any, sharding: Sharding) -> jax.Array:
    """Copies ``array`` to where ``sharding`` says."""
    logging.debug(
        "shardmap: moved %s from %s to %s",
        jax.typeof(array).str_short(),
        getattr(array, "sharding", "the host"),
        sharding,
    )
    return jax.device_put(array, sharding)
