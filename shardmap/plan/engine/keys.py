"""Random keys, which have dtypes of their own and no NumPy form."""

import functools
from typing import Any

import jax

from shardmap._jax.types import Atom, Aval
from shardmap.plan.engine.nodes import Refused, Value
from shardmap.plan.engine.slices import Box, volume

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def is_key(aval: Aval) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def data_aval(aval: Aval) -> Aval:
    """The aval of what is stored: random keys are stored as their bits."""
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, aval)
    return aval


@functools.cache
def _names() -> dict[Any, str]:
    return {
        jax.eval_shape(functools.partial(jax.random.key, impl=name), 0).dtype: name
        for name in IMPLEMENTATIONS
    }


def key_impl(aval: Aval) -> str | None:
    """The name of the implementation, None for what is no key.

    Raises:
      Refused: JAX does not know the implementation by name.
    """
    if not is_key(aval):
        return None
    if aval.dtype not in _names():
        raise Refused(f"keys of the type {aval.dtype} have no known implementation")
    return _names()[aval.dtype]


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
    """The bytes of a value as it is stored; 0 of what is no array, such as a token."""
    aval: Any = value.aval
    return aval.size * itemsize(aval) if hasattr(aval, "dtype") else 0
