"""Arrays as ``.npy`` files have them.

The format knows NumPy's own types. Those that JAX adds, such as bfloat16, would be read
back as bytes without a meaning, so that a file has their bits as unsigned integers.
"""

import numpy as np
from jax.typing import DTypeLike


def stored_dtype(dtype: DTypeLike) -> np.dtype:
    """What a file has for a dtype.

    >>> import jax.numpy as jnp
    >>> stored_dtype(np.float32), stored_dtype(jnp.bfloat16)
    (dtype('float32'), dtype('uint16'))
    """
    dtype = np.dtype(dtype)
    return np.dtype(f"u{dtype.itemsize}") if dtype.isbuiltin == 2 else dtype


def stored(array: np.ndarray) -> np.ndarray:
    """The same bits as `stored_dtype` says."""
    return array.view(stored_dtype(array.dtype))
