"""`PmapSharding`, `replicate` and `make_sharded_device_array`: arrays for a map."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardmap._jax.types import Aval, PyTree
from shardmap.arrays.stacking import device_put_replicated
from shardmap.sharding.conversions import pmap_sharding
from shardmap.sharding.spec import ShardedAxis, ShardingSpec, Unstacked

__all__ = ["PmapSharding", "make_sharded_device_array", "replicate"]


class PmapSharding:
    """Makes the `jax.sharding.NamedSharding` that lays out arrays as PmapSharding did.

    There are no objects of this type, so ``isinstance(x.sharding, PmapSharding)`` is
    False. Ask `shardmap.spec_of` how an array is sharded.

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


def make_sharded_device_array(
    aval: Aval | jax.ShapeDtypeStruct,
    sharding_spec: ShardingSpec | None,
    device_buffers: Sequence[jax.Array],
    indices: Sequence[object] | None = None,
) -> jax.Array:
    """Makes one array of arrays that are on a device each.

    Args:
      aval: has the ``shape`` of the whole array; its dtype is that of the buffers.
      sharding_spec: how the array is cut over the devices, in the order of its mesh
        mapping; None: it is stacked along dimension 0, a row for each device.
      device_buffers: for each device an array of the shape that the spec gives it.
        Dimensions that are ``Unstacked`` may be missing, as they were in old buffers.
      indices: what each device has; it follows from the spec, and is not looked at.

    Returns:
      An array over the devices of the buffers, which are not copied unless a dimension
      is missing.

    Raises:
      ValueError: the spec does not cut the shape, or cuts it for another number of
        devices, or into parts of other shapes.

    >>> import shardmap as sm
    >>> spec = sm.ShardingSpec((sm.Unstacked(1), None), (sm.ShardedAxis(0),))
    >>> aval = jax.ShapeDtypeStruct((1, 3), np.float32)
    >>> make_sharded_device_array(aval, spec, [jax.numpy.ones(3)]).shape
    (1, 3)
    """
    shape = tuple(aval.shape)
    devices = [next(iter(buffer.devices())) for buffer in device_buffers]
    rows = (Unstacked(len(devices)), *[None] * (len(shape) - 1))
    spec = sharding_spec or ShardingSpec(rows, (ShardedAxis(0),))
    sharding = PmapSharding(devices, spec)
    part = sharding.shard_shape(shape)
    entries = zip(part, spec.sharding, strict=True)
    kept = tuple(n for n, entry in entries if not isinstance(entry, Unstacked))
    for index, buffer in enumerate(device_buffers):
        if buffer.shape not in (part, kept):
            raise ValueError(
                f"make_sharded_device_array device_buffers[{index}] has shape "
                f"{buffer.shape}, but each of the {len(devices)} devices has {part} of "
                f"an array of shape {shape}. Give a buffer of that shape for each."
            )
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [buffer.reshape(part) for buffer in device_buffers]
    )


def replicate(
    val: PyTree,
    axis_size: int,
    nrep: int,
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    in_axis: int | None = 0,
) -> PyTree:
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
