"""The names that programs written for `jax.pmap` import, as they were before JAX 0.8.

    from shardmap.compat import pmap, device_put_replicated

Each is another name for what `shardmap` has. docs/migrating.md goes through them, and
says what to do for a program that looks up ``jax.pmap`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardmap.map.api import spmap as pmap
from shardmap.map.api import spmap as soft_pmap
from shardmap.map.stacking import device_put_replicated, device_put_sharded
from shardmap.sharding.named import pmap_sharding
from shardmap.sharding.spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    spec_to_indices,
)

__all__ = [
    "Chunked",
    "NoSharding",
    "PmapSharding",
    "Replicated",
    "ShardedAxis",
    "ShardingSpec",
    "Unstacked",
    "device_put_replicated",
    "device_put_sharded",
    "pmap",
    "soft_pmap",
    "spec_to_indices",
]


class PmapSharding:
    """Makes the `jax.sharding.NamedSharding` that lays out arrays as PmapSharding did.

    There are no objects of this type, so ``isinstance(x.sharding, PmapSharding)`` is
    False. Ask `shardmap.spec_of` how an array lies.

    >>> PmapSharding.default((1, 5)).shard_shape((1, 5))
    (1, 5)
    """

    default = staticmethod(pmap_sharding)

    def __new__(  # type: ignore[misc]
        cls,
        devices: Sequence[jax.Device] | np.ndarray,
        sharding_spec: ShardingSpec,
    ) -> NamedSharding:
        """The layout of a spec over devices, ``Unstacked`` dimensions included.

        >>> spec = ShardingSpec((Unstacked(1), None), (ShardedAxis(0),))
        >>> PmapSharding(jax.local_devices()[:1], spec).shard_shape((1, 5))
        (1, 5)
        """
        return sharding_spec.stacked().named_sharding(devices)
