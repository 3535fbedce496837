"""Values that are not JAX arrays, cut for the devices.

An array-like has ``shape``, ``dtype`` and ``__getitem__``: `numpy.memmap`, the datasets
of h5py, the arrays of zarr. Of those each device reads its own slice and no more. What
cannot be indexed so has a handler of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from shardmap._jax.types import Value, without_sharding
from shardmap.units import shown

Handler: TypeAlias = Callable[[Any, Sharding], jax.Array]
Box: TypeAlias = tuple[tuple[int, int], ...]

HANDLERS: dict[type, Handler] = {}
"""How values of a type are put on devices; see `extend.register_shard_handler`."""


def handler_of(cls: type) -> Handler | None:
    return next((HANDLERS[base] for base in cls.__mro__ if base in HANDLERS), None)


def is_array_like(value: object) -> bool:
    """Whether a value is for `device_put_array_like`, not for `jax.device_put`."""
    if isinstance(value, np.generic):
        return False
    if handler_of(type(value)) or isinstance(value, np.memmap):
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
    """The aval of an array, an array-like, or a description; TypeError for others.

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


def is_labelled(value: object) -> bool:
    """Whether a value is an xarray array or dataset; xarray may not be installed."""
    return any(
        cls.__module__.partition(".")[0] == "xarray"
        and cls.__name__ in ("DataArray", "Dataset")
        for cls in type(value).__mro__
    )


def refusal(value: object) -> str | None:
    """Why an array or array-like is not one for devices; None for other values."""
    if is_labelled(value) and handler_of(type(value)) is None:
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
    """Why a table, as of pandas or polars, is refused; None: it is no table."""
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
    handler = handler_of(type(value))
    if handler is None:
        return _read(value, sharding)
    array = handler(value, sharding)
    shape, dtype = tuple(value.shape), device_dtype(value.dtype)
    if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (shape, dtype):
        problem = f"a jax.Array of shape {shape} and dtype {dtype}, not {shown(array)}"
    elif not array.sharding.is_equivalent_to(sharding, len(shape)):
        problem = f"an array with {sharding}, not with {array.sharding}"
    else:
        return array
    raise ValueError(
        f"the handler registered for {type(value).__name__} must give {problem}."
    )


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
    """Refuses a slice that its array-like's dtype would truncate or round."""
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
