"""How partial results are combined, and what each combination starts from."""

from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike


def identity(combiner: str, dtype: DTypeLike) -> np.ndarray:
    """What changes nothing when it is combined."""
    dtype = np.dtype(dtype)
    if combiner in ("add", "or", "xor"):
        return np.zeros((), dtype)
    if combiner == "mul":
        return np.ones((), dtype)
    if dtype.kind == "b":
        return np.array(combiner in ("and", "min"))
    if combiner == "and":
        return np.array(-1).astype(dtype)
    if jax.numpy.issubdtype(dtype, np.inexact):
        infinite = np.array(np.inf if combiner == "min" else -np.inf).astype(dtype)
        if np.isinf(infinite):
            return infinite
        limits: Any = jax.numpy.finfo(dtype)
    else:
        limits = jax.numpy.iinfo(dtype)
    return np.array(limits.max if combiner == "min" else limits.min, dtype)
