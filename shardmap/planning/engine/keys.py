"""Random keys, which have dtypes of their own and no NumPy form."""

import functools
from typing import Any

import jax

from shardmap._jax.types import Atom, Aval
from shardmap.planning.engine.nodes import Value
from shardmap.planning.engine.slices import Box, volume


def is_key(aval: Aval) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def data_aval(aval: Aval) -> Aval:
    """The aval of the stored array: random keys are stored as their bits."""
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, aval)
    return aval


def key_impl(aval: Aval) -> Any:
    """The ``impl`` for `jax.random.wrap_key_data`; None if the aval is no key."""
    return _impl_of(aval.dtype) if is_key(aval) else None


@functools.cache
def _impl_of(dtype: Any) -> Any:
    impls: list[Any] = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return impls[0]


def itemsize(aval: Aval) -> int:
    """The bytes of one element as it is stored."""
    if is_key(aval):
        data = data_aval(aval)
        return data.dtype.itemsize * data.shape[-1]
    return aval.dtype.itemsize


def box_bytes(value: Value, box: Box) -> int:
    """The bytes of a box of a value as it is stored."""
    return volume(box) * itemsize(value.aval)


def nbytes(value: Value | Atom) -> int:
    """The bytes of a value as it is stored; 0 if it is no array, such as a token."""
    aval: Any = value.aval
    return aval.size * itemsize(aval) if hasattr(aval, "dtype") else 0
