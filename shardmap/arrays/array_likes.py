"""Values that are not JAX arrays, cut for the devices.

An array-like has ``shape``, ``dtype`` and ``__getitem__``: `numpy.memmap`, the datasets
of h5py, the arrays of zarr. Of those each device reads its own slice and no more. What
cannot be indexed so has a handler of its own.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from shardmap._jax.types import Value, has_explicit_sharding, without_sharding
from shardmap.arrays.sources.labelled import is_labelled
from shardmap.arrays.sources.registry import (
    Describe,
    Grain,
    Opener,
    Reopen,
    register_opener,
    type_name,
)
from shardmap.sharding.mesh import auto_mesh
from shardmap.units import shown

Handler: TypeAlias = Callable[[Any, Sharding], jax.Array]
Box: TypeAlias = tuple[tuple[int, int], ...]

_handlers: dict[type, Handler] = {}


def register_shard_handler(
    cls: type,
    handler: Handler | None = None,
    *,
    describe: Describe | None = None,
    reopen: Reopen | None = None,
    grain: Grain | None = None,
) -> None:
    """Registers how values of a type are put on devices and opened in other processes.

    Maps then accept such values as arrays. `numpy.memmap` and other values with
    ``shape``, ``dtype`` and ``__getitem__`` need no handler: each device reads its own
    slice. `plan` accepts both; a shard reads its own slices if it can.

    Args:
      cls: the type. It also applies to derived types without a handler of their own.
        Its values have ``shape`` and ``dtype``.
      handler: ``handler(value, sharding)`` returns a `jax.Array` with the shape of
        ``value`` and this `jax.sharding.Sharding`. `jax.make_array_from_callback` reads
        the part of one device at a time. A later handler for the same type replaces it.
      describe: ``describe(value)`` returns a dict, which JSON can express, that says
        where the value is stored, or None if other processes cannot open it. Its
        ``"place"`` is equal for equal values. Shards of a plan in other processes then
        read the value themselves. `numpy.memmap`, h5py and zarr need no such function.
      reopen: ``reopen(said, writable)`` opens the value in another process. It must be
        a function of a module, because it is pickled by name.
      grain: ``grain(value)`` returns, for each axis, the length of the cells that one
        process at a time may write, or None if other processes may not write. Without
        it, the process that runs the plan writes.

    Raises:
      TypeError: ``cls`` is not a type, another argument is not callable, or ``handler``
        does not take two arguments.
      ValueError: JAX itself shards values of ``cls``.

    Example:
      >>> class Squares:
      ...     shape, dtype = (4,), np.dtype("int32")
      >>> def put(value, sharding):
      ...     def part(index):
      ...         return np.arange(4, dtype=value.dtype)[index] ** 2
      ...     return jax.make_array_from_callback(value.shape, sharding, part)
      >>> register_shard_handler(Squares, put)
      >>> sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> device_put_array_like(Squares(), sharding)
      Array([0, 1, 4, 9], dtype=int32)
    """
    if not inspect.isclass(cls):
        raise TypeError(f"register_shard_handler takes a type, got {shown(cls)}.")
    travels = describe is not None and reopen is not None
    functions = {"describe": describe, "reopen": reopen, "grain": grain}
    for name, function in functions.items():
        if not (function is None or callable(function)):
            raise TypeError(
                f"register_shard_handler takes a function as {name}, got "
                f"{shown(function)} for {cls.__name__}."
            )
    if not travels and any(functions.values()):
        missing = "reopen" if reopen is None else "describe"
        raise TypeError(
            f"register_shard_handler got no {missing} for {cls.__name__}: give both "
            "describe and reopen, or neither."
        )
    if not (callable(handler) or (handler is None and travels)):
        raise TypeError(
            "register_shard_handler takes a function of a value and a sharding, got "
            f"{shown(handler)} for {cls.__name__}."
        )
    if handler is not None and not takes(2, handler):
        raise TypeError(
            "register_shard_handler takes a function of a value and a sharding, but "
            f"the one for {cls.__name__} takes {inspect.signature(handler)}. A handler "
            "of a value, devices and indices, as JAX had them, is registered by "
            f"shardmap.compat.shard_arg_handlers[{cls.__name__}] = handler."
        )
    if issubclass(cls, jax.Array | np.generic | bool | int | float | complex) or (
        cls is np.ndarray
    ):
        raise ValueError(
            f"register_shard_handler cannot change how {cls.__name__} is laid out: JAX "
            "does that itself. Register a type of your own."
        )
    if handler is not None:
        _handlers[cls] = handler
    if describe is not None and reopen is not None:
        name = type_name(cls)
        register_opener(name, Opener(name, describe, reopen, grain))


def takes(count: int, function: Callable[..., object]) -> bool:
    """Whether a function can be called with so many positional arguments.

    >>> takes(2, lambda value, sharding: value), takes(2, lambda x, devices, indices: x)
    (True, False)
    """
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # It has no signature.
        return True
    except TypeError:
        return False
    return True


def _handler(cls: type) -> Handler | None:
    return next((_handlers[base] for base in cls.__mro__ if base in _handlers), None)


def is_array_like(value: object) -> bool:
    """Whether a value is for `device_put_array_like`, not for `jax.device_put`."""
    if isinstance(value, np.generic):
        return False
    if _handler(type(value)) or isinstance(value, np.memmap):
        return True
    if isinstance(value, np.ndarray) or not all(
        hasattr(value, name) for name in ("shape", "dtype", "__getitem__")
    ):
        return False
    try:
        typeof(value)
    except TypeError:
        return True
    return False


def typeof(value: object) -> Any:
    """`jax.typeof`. An error is a TypeError also if it comes from ``repr(value)``."""
    try:
        return jax.typeof(value)
    except TypeError:
        raise
    except Exception as error:
        raise TypeError(f"{shown(value)} is not a valid JAX type") from error


def abstract_value(value: Value) -> Any:
    """The aval of an argument: an array, an array-like, or a description of one.

    Raises:
      TypeError: nothing that JAX or a handler can put on a device.

    >>> abstract_value(np.zeros((2, 3)))
    ShapedArray(float32[2,3])
    """
    if isinstance(value, jax.core.ShapedArray):
        return without_sharding(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        return without_sharding(jax.typeof(value))
    if is_array_like(value):
        if refusal(value):
            raise TypeError(refusal(value))
        return jax.core.ShapedArray(tuple(value.shape), device_dtype(value.dtype))
    return typeof(value)


def refusal(value: object) -> str | None:
    """Why an array or array-like is not one for devices; None for other values."""
    if is_labelled(value) and _handler(type(value)) is None:
        return (
            f"is an xarray.{type(value).__name__}, whose labels the result would not "
            "have. Give the array, x.data, or use shardmap.plan, which keeps them."
        )
    dtype = getattr(value, "dtype", None)
    if not (isinstance(dtype, np.dtype) and hasattr(value, "shape")):
        return _table_refusal(value)
    in_memory = not is_array_like(value) and isinstance(value, np.ndarray | np.generic)
    try:
        jax.typeof(np.empty(0, dtype if in_memory else dtype.newbyteorder("=")))
    except TypeError:
        what = "is a NumPy array of" if in_memory else "has the"
        return (
            f"{what} dtype {dtype}, which JAX cannot compute with. Give numbers, such "
            "as x.astype('float32')."
        )
    return None


def _table_refusal(value: object) -> str | None:
    """Why a table, such as one of pandas or polars, is refused; None: it is no table.

    >>> _table_refusal([1, 2]) is None
    True
    """
    if not (hasattr(value, "to_numpy") and hasattr(value, "columns")):
        return None
    labelled = ""
    if hasattr(value, "to_xarray"):
        labelled = ", or .to_xarray() to shardmap.plan, which keeps the labels"
    return (
        f"is a {type(value).__name__}, a table whose columns have a dtype each. Give "
        f"its .to_numpy(){labelled}."
    )


def device_dtype(dtype: DTypeLike) -> np.dtype:
    """What a dtype is on devices: in native byte order, 32 bits unless x64 is on.

    >>> device_dtype(">f8")
    dtype('float32')
    """
    dtype = np.dtype(dtype)
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    return jax.dtypes.canonicalize_dtype(native)


def device_put_array_like(value: Value, sharding: Sharding) -> jax.Array:
    """Puts an array-like, or a value of a type with a handler, on devices."""
    handler = _handler(type(value))
    if handler is None:
        return _read(value, sharding)
    array = handler(value, sharding)
    shape, dtype = tuple(value.shape), device_dtype(value.dtype)
    if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (shape, dtype):
        raise ValueError(
            f"the handler that is registered for {type(value).__name__} must give a "
            f"jax.Array of shape {shape} and dtype {dtype}, but gave {shown(array)}."
        )
    if not array.sharding.is_equivalent_to(sharding, len(shape)):
        raise ValueError(
            f"the handler that is registered for {type(value).__name__} was asked for "
            f"{sharding}, but gave an array with {array.sharding}."
        )
    return array


def sliceable(value: Value) -> Any:
    """The value, or if it has no slices, an array that has them.

    A handler makes it, or it is an array along Explicit mesh axes, whose slices have no
    layout that JAX knows. On Auto axes they have.
    """
    if isinstance(value, jax.Array):
        explicit, is_typed = value.sharding, has_explicit_sharding(jax.typeof(value))
        if not isinstance(explicit, NamedSharding) or not is_typed:
            return value
        mesh, kind = auto_mesh(explicit.mesh), explicit.memory_kind
        auto = NamedSharding(mesh, explicit.spec, memory_kind=kind)
        return jax.device_put(value, auto)
    if _handler(type(value)) is None or hasattr(value, "__getitem__"):
        return value
    return device_put_array_like(value, SingleDeviceSharding(jax.local_devices()[0]))


def _read(value: Value, sharding: Sharding) -> jax.Array:
    """Reads each slice that some device holds once, one after the other."""
    shape, dtype = tuple(value.shape), device_dtype(value.dtype)
    held = boxes(sharding, shape)
    holders: dict[Box, list[jax.Device]] = {}
    for device, bounds in held.items():
        holders.setdefault(bounds, []).append(device)
    arrays: dict[jax.Device, jax.Array] = {}
    for bounds, devices in holders.items():
        part = np.asarray(value[tuple(slice(*pair) for pair in bounds)])
        refuse_other_dtype(value, part)
        put = jax.device_put([np.asarray(part, dtype)] * len(devices), devices)
        arrays.update(zip(devices, put, strict=True))
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [arrays[device] for device in held]
    )


def refuse_other_dtype(value: Value, part: np.ndarray) -> None:
    """Refuses a slice that its array-like's dtype cannot hold.

    Raises:
      ValueError: the slice would be truncated or rounded to that dtype.
    """
    said = getattr(value, "dtype", part.dtype)
    if not np.can_cast(part.dtype, said, "safe"):
        raise ValueError(
            f"its dtype is {said}, but its __getitem__ gave {part.dtype}: wrap it in a "
            "class whose dtype is that of its slices, or have it give its own dtype, "
            "as netCDF4's variable.set_auto_maskandscale(False) does"
        )


def box(index: Value, shape: Sequence[int]) -> Box:
    """An index of slices as (start, stop) pairs.

    >>> box((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    """What each device of this process holds, in the order of the shards."""
    held = sharding.addressable_devices_indices_map(shape)
    return {device: box(index, shape) for device, index in held.items()}
