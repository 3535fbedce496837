"""Combiners of reductions by name, with their identities."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,  # Booleans too, as in products of them.
    "and": lax.bitwise_and,
    "max": lax.max,
    "min": lax.min,
    "mul": lax.mul,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
}
"""The combiners, each for two arrays of one dtype."""

COMBINE_IN_NUMPY: Mapping[str, Any] = {
    "add": np.add,
    "and": np.bitwise_and,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""The same combiners for NumPy arrays."""


def identity(combiner: str, dtype: DTypeLike) -> np.ndarray:
    """The identity of a combiner.

    >>> identity("add", np.int8), identity("min", np.float32)
    (array(0, dtype=int8), array(inf, dtype=float32))
    """
    dtype = np.dtype(dtype)
    if combiner == "add" and jnp.issubdtype(dtype, np.inexact):
        # ``-0.0 + 0.0`` is 0.0: the sum with 0.0 would change the sign of a zero.
        return -np.zeros((), dtype)
    if combiner in ("add", "or", "xor"):
        return np.zeros((), dtype)
    if combiner == "mul":
        return np.ones((), dtype)
    if dtype.kind == "b":
        return np.array(combiner in ("and", "min"))
    if combiner == "and":
        return np.array(-1).astype(dtype)
    if jnp.issubdtype(dtype, np.inexact):  # min, max and logaddexp
        infinity = np.inf if combiner == "min" else -np.inf
        infinite = np.array(infinity)
        if jnp.issubdtype(dtype, np.complexfloating) and combiner in ("min", "max"):
            # The real parts count first, then the imaginary ones.
            infinite = np.array(complex(infinity, infinity))
        infinite = infinite.astype(dtype)
        if np.isinf(infinite):
            return infinite
        # The short floats that have no infinity make it a NaN.
        limits: Any = jnp.finfo(dtype)
    else:
        limits = jnp.iinfo(dtype)
    return np.array(limits.max if combiner == "min" else limits.min, dtype)
