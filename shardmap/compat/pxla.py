"""Functions of ``jax.interpreters.pxla``: arrays made of buffers, and their specs."""

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.linear_util import WrappedFun
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardmap._jax.types import Aval, Jaxpr, PyTree, Value
from shardmap._jax.walk import as_open_jaxpr
from shardmap.api.spmap import spmap
from shardmap.arrays.stacking import device_put_replicated
from shardmap.map.primitives.map_primitive import remove_axis
from shardmap.map.tracing import trace_body
from shardmap.sharding.mesh import pmap_sharding, too_few_devices
from shardmap.sharding.spec import (
    AvalDimSharding,
    Chunked,
    MeshDimAssignment,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)

__all__ = [
    "AvalDimSharding",
    "MeshDimAssignment",
    "PmapSharding",
    "ShardedDeviceArray",
    "_pmap_sharding_spec",
    "device_put",
    "make_sharded_device_array",
    "partitioned_sharding_spec",
    "replicate",
    "shard_arg_handlers",
    "soft_pmap",
    "xla_pmap",
]


def xla_pmap(
    *args: Any,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None] | None = None,
    out_axes_thunk: Callable[[], Sequence[int | None]] | None = None,
    call_jaxpr: Jaxpr | None = None,
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    donated_invars: Sequence[bool] = (),
    **_: object,
) -> list[Any]:
    """`shardmap.spmap` of flat values, with the parameters of ``pxla.xla_pmap``.

    Args:
      *args: the function of one element, or none if there is ``call_jaxpr``; then the
        arrays.
      axis_name, axis_size, devices, backend: as for `shardmap.spmap`.
      in_axes: the mapped axis of each array.
      out_axes, out_axes_thunk: that of each result, or what gives it after a trace.
      call_jaxpr: the function as a jaxpr without constants.
      donated_invars: which arrays are donated.

    Returns:
      The results, as a list.

    >>> x = np.arange(1.0)
    >>> xla_pmap(lambda x: [x + 1], x, axis_name="i", axis_size=1, in_axes=(0,),
    ...          out_axes=(0,))
    [Array([1.], dtype=float32)]
    """
    constants: Sequence[Any] = ()
    if call_jaxpr is None:
        fun, args = args[0], args[1:]
        call = fun.call_wrapped if isinstance(fun, WrappedFun) else fun
        avals = list(map(remove_axis, map(jax.typeof, args), in_axes))
        body = trace_body(call, avals, axis_name, axis_size)
        call_jaxpr, constants = body.jaxpr, body.constants
    mapped = _mapped(
        call_jaxpr,
        axis_name,
        axis_size,
        (None,) * len(constants) + tuple(in_axes),
        tuple(out_axes_thunk() if out_axes_thunk else out_axes or ()),
        None if devices is None else tuple(devices),
        backend,
        tuple(len(constants) + k for k, donate in enumerate(donated_invars) if donate),
    )
    results: list[Any] = mapped(*constants, *args)
    return results


soft_pmap = xla_pmap


@functools.lru_cache(maxsize=256)
def _mapped(
    jaxpr: Jaxpr,
    axis_name: Hashable,
    axis_size: int,
    in_axes: tuple[int | None, ...],
    out_axes: tuple[int | None, ...],
    devices: tuple[jax.Device, ...] | None,
    backend: str | None,
    donated: tuple[int, ...],
) -> Callable[..., list[Any]]:
    def element(*args: Value) -> list[Any]:
        results: list[Any] = jax.core.eval_jaxpr(as_open_jaxpr(jaxpr), (), *args)
        return results

    return spmap(
        element,
        axis_name,
        in_axes=in_axes,
        out_axes=list(out_axes),
        devices=devices,
        backend=backend,
        axis_size=axis_size,
        donate_argnums=donated,
    )


class PmapSharding:
    """Makes a `jax.sharding.NamedSharding` with the layout of the old PmapSharding.

    No object has this type, so ``isinstance(x.sharding, PmapSharding)`` is False. Use
    `shardmap.spec_of`.

    >>> PmapSharding.default((1, 5)).shard_shape((1, 5))
    (1, 5)
    """

    default = staticmethod(pmap_sharding)

    # Calls of the old class made a sharding; JAX has only `NamedSharding` now.
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
    """Makes one array from arrays on one device each.

    Args:
      aval: has the ``shape`` of the whole array. The dtype is that of the buffers.
      sharding_spec: the spec of the array, over the devices in the order of its mesh.
        None: the array is stacked along dimension 0, one row for each device.
      device_buffers: the shard of each device. `Unstacked` dimensions may be missing,
        as in old buffers.
      indices: not used, as the spec determines them.

    Returns:
      An array over the devices of the buffers, which are not copied unless a dimension
      is missing.

    Raises:
      ValueError: the spec does not fit the shape, the number of devices, or the shapes
        of the shards.

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


def device_put(
    x: Any, devices: Sequence[jax.Device], replicate: bool = False
) -> list[Any]:
    """Puts an array on each device: the buffers of `make_sharded_device_array`.

    Args:
      x: an array for each device; with ``replicate``, one for all.
      devices: the devices.
      replicate: whether all devices get the same array.

    >>> [buffer.shape for buffer in device_put([np.ones(3)], jax.devices()[:1])]
    [(3,)]
    """
    values = [x] * len(devices) if replicate else list(x)
    if len(values) != len(devices):
        raise ValueError(
            f"device_put got {len(values)} arrays for {len(devices)} devices: give "
            "one for each, or replicate=True."
        )
    put: list[Any] = jax.device_put(values, list(devices))
    return put


class _IsArray(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, jax.Array)


class ShardedDeviceArray(metaclass=_IsArray):
    """Makes a `jax.Array` from one array on each device. Every array is an instance.

    >>> import jax, numpy as np
    >>> aval = jax.ShapeDtypeStruct((1, 3), np.float32)
    >>> x = ShardedDeviceArray(aval, [jax.numpy.ones(3)])
    >>> x.shape, isinstance(x, ShardedDeviceArray)
    ((1, 3), True)
    """

    def __new__(  # type: ignore[misc]
        cls,
        aval: Aval | jax.ShapeDtypeStruct,
        sharding_spec: Any,
        device_buffers: Sequence[jax.Array] | None = None,
        indices: Sequence[object] | None = None,
    ) -> jax.Array:
        """As `make_sharded_device_array`; the spec is optional."""
        if device_buffers is None:
            return make_sharded_device_array(aval, None, device_buffers=sharding_spec)
        return make_sharded_device_array(aval, sharding_spec, device_buffers, indices)


OldHandler: TypeAlias = Callable[..., Sequence[jax.Array]]


class _ShardArgHandlers(dict[type, OldHandler]):
    """``shard_arg_handlers[T] = handler`` registers a handler of three arguments."""

    def __setitem__(self, cls: type, handler: OldHandler) -> None:
        # Most that import this module register none.
        from shardmap.planning.sources.registry import register_shard_handler, takes

        if not takes(3, handler):
            raise TypeError(
                "shard_arg_handlers takes a function of a value, devices and indices, "
                f"but the one for {cls.__name__} takes {inspect.signature(handler)}. "
                "Register a function of a value and a sharding by "
                "shardmap.extend.register_shard_handler."
            )

        def put(value: Value, sharding: Sharding) -> jax.Array:
            shape = tuple(value.shape)
            held = sharding.addressable_devices_indices_map(shape)
            part = sharding.shard_shape(shape)
            indices = [tuple(map(_old_index, cuts or ())) for cuts in held.values()]
            buffers = handler(value, list(held), indices)
            return jax.make_array_from_single_device_arrays(
                shape, sharding, [buffer.reshape(part) for buffer in buffers]
            )

        register_shard_handler(cls, put)
        super().__setitem__(cls, handler)


def _old_index(cut: slice) -> int | slice:
    """The old index: an int for a mapped dimension."""
    is_one = cut != slice(None) and cut.stop - cut.start == 1
    return int(cut.start) if is_one else cut


shard_arg_handlers = _ShardArgHandlers()
"""``handler(value, devices, indices)`` gives a buffer for each device."""


def partitioned_sharding_spec(
    num_partitions: int, partitions: Sequence[int] | None, aval: Aval
) -> ShardingSpec:
    """The spec of an array that `shardmap.sharded_jit` partitions.

    Args:
      num_partitions: the number of devices that hold the array if it is not cut.
      partitions: the number of parts of each dimension; None: it is not cut.
      aval: the array's shape and dtype.

    >>> aval = jax.ShapeDtypeStruct((4, 2), np.float32)
    >>> partitioned_sharding_spec(4, (2, 2), aval).mesh_shape
    (2, 2)
    """
    if partitions is None:
        copies = (Replicated(num_partitions),) if num_partitions > 1 else ()
        return ShardingSpec((None,) * len(aval.shape), copies)
    axes = map(ShardedAxis, range(len(partitions)))
    return ShardingSpec(map(Chunked, partitions), axes)


def _pmap_sharding_spec(
    nrep: int,
    axis_size: int,
    npart: int,
    parts: Sequence[int] | None,
    sharded_aval: Aval,
    map_axis: int | None,
) -> ShardingSpec:
    """The spec of an argument or a result of a map.

    Args:
      nrep: the number of devices of the map and those inside it.
      axis_size: the size of the mapped axis.
      npart: the number of parts that `shardmap.sharded_jit` cuts each element into.
      parts: the number of parts of each dimension; None: it is not cut.
      sharded_aval: one element's shape and dtype.
      map_axis: the position of the mapped axis; None: there is none.

    >>> aval = jax.ShapeDtypeStruct((3,), np.float32)
    >>> _pmap_sharding_spec(8, 4, 1, None, aval, 0)
    ShardingSpec((Unstacked(4), None), (ShardedAxis(0), Replicated(2)))
    """
    copies, rest = divmod(nrep, axis_size)
    if rest:
        raise ValueError(
            f"_pmap_sharding_spec nrep {nrep} is not a multiple of axis_size "
            f"{axis_size}: each element needs as many devices."
        )
    element = partitioned_sharding_spec(npart, parts, sharded_aval)
    inner = (Replicated(copies),) if copies > 1 else ()
    if map_axis is None:
        mapping = (Replicated(axis_size), *inner, *element.mesh_mapping)
        return ShardingSpec(element.sharding, mapping)
    before, after = element.sharding[:map_axis], element.sharding[map_axis:]
    number = sum(entry is not None for entry in before)
    moved = (
        ShardedAxis(entry.axis + (entry.axis >= number))
        if isinstance(entry, ShardedAxis)
        else entry
        for entry in element.mesh_mapping
    )
    return ShardingSpec(
        (*before, Unstacked(axis_size), *after), (ShardedAxis(number), *inner, *moved)
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
      axis_size: the length of the new axis, which is ``nrep``.
      nrep: the number of devices that get a copy.
      devices: these devices. Default: the first of `jax.local_devices`.
      backend: the platform of the default devices.
      in_axis: the position of the new axis. None: there is no new axis.

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
            f"{too_few_devices(nrep)}"
        )
    if in_axis is None:
        return jax.device_put(val, NamedSharding(Mesh(devices, "i"), PartitionSpec()))
    if axis_size != nrep:
        raise ValueError(
            "replicate takes as many elements as devices, but axis_size is "
            f"{axis_size} and nrep is {nrep}. Use jax.device_put with the sharding of "
            "a ShardingSpec."
        )
    return device_put_replicated(val, devices, axis=in_axis)
