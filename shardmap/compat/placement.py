"""`PmapSharding` and `replicate`, which laid out arrays for a map."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardmap.arrays.stacking import device_put_replicated
from shardmap.sharding.spec import ShardingSpec, pmap_sharding

__all__ = ["PmapSharding", "replicate"]


class PmapSharding:
    """Makes the `jax.sharding.NamedSharding` that lays out arrays as PmapSharding did.

    There are no objects of this type, so ``isinstance(x.sharding, PmapSharding)`` is
    False. Ask `shardmap.spec_of` how an array lies.

    >>> PmapSharding.default((1, 5)).shard_shape((1, 5))
    (1, 5)
    """

    default = staticmethod(pmap_sharding)

    # The old class was called to make one; JAX has only `NamedSharding` for it now.
    def __new__(  # type: ignore[misc]
        cls,
        devices: Sequence[jax.Device] | np.ndarray,
        sharding_spec: ShardingSpec,
    ) -> NamedSharding:
        """The layout of a spec over devices, ``Unstacked`` dimensions included.

        >>> import shardmap as sm
        >>> spec = sm.ShardingSpec((sm.Unstacked(1), None), (sm.ShardedAxis(0),))
        >>> PmapSharding(jax.local_devices()[:1], spec).shard_shape((1, 5))
        (1, 5)
        """
        return sharding_spec.stacked().named_sharding(devices)


def replicate(
    val: Any,
    axis_size: int,
    nrep: int,
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    in_axis: int | None = 0,
) -> Any:
    """`shardmap.device_put_replicated` with the parameters of ``pxla.replicate``.

    Args:
      val: an array or a pytree of arrays.
      axis_size: how long the new axis is; it divides ``nrep``.
      nrep: how many devices get a copy.
      devices: these devices, by default the first of `jax.local_devices`.
      backend: whose local devices, if ``devices`` is None.
      in_axis: where the new axis is; None: there is none.

    Raises:
      ValueError: there are not ``nrep`` devices; or as `device_put_replicated`.

    >>> replicate(np.ones(3), 1, 1, in_axis=1).shape
    (3, 1)
    """
    if devices is None:
        devices = jax.local_devices(backend=backend)[:nrep]
    if len(devices) != nrep:
        raise ValueError(
            f"Cannot replicate across {nrep} replicas because {len(devices)} devices "
            "are given, or are on this process. Make nrep the number of devices."
        )
    size = None if in_axis is None else axis_size
    return device_put_replicated(val, devices, axis=in_axis, axis_size=size)
