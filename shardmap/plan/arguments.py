"""What a plan may be given, and what tracing needs to know of it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from shardmap._jax.stages import trace_as
from shardmap._jax.types import PyTree
from shardmap.arrays.array_likes import abstract_value, device_dtype, is_array_like
from shardmap.plan.run.buffers import refuse_masked


def aval_of(leaf: Any, name: str) -> Any:
    """What tracing needs to know of an argument, which is not read.

    Raises:
      TypeError: no array of numbers or booleans.
      ValueError: it is masked, or nobody knows how long it is.
    """
    if isinstance(leaf, bool | int | float | complex | jax.Array | np.generic):
        return leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"plan takes arrays or what has a shape and a dtype, got {leaf!r} of type "
            f"{type(leaf).__name__} in {name}; bind what is no array before, with "
            "functools.partial"
        )
    dtype = leaf.dtype
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        if not any(jax.dtypes.issubdtype(dtype, k) for k in (np.number, np.bool_)):
            raise TypeError(
                f"plan takes numbers and booleans, got {dtype} in {name}: give what "
                "it stands for as numbers, such as array.astype('int64')"
            )
        try:
            refuse_masked(leaf)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if is_array_like(leaf):
            dtype = abstract_value(leaf).dtype
        dtype = device_dtype(np.dtype(dtype))
    unknown = [axis for axis, size in enumerate(leaf.shape) if size != size]
    if unknown:  # As of arrays of Dask from which elements were picked.
        raise ValueError(
            f"{name} has the shape {tuple(leaf.shape)}, whose length along axis "
            f"{unknown[0]} is not known: compute it before, as "
            "dask.array's x.compute_chunk_sizes() does"
        )
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def narrowed_dtype(leaf: Any) -> tuple[np.dtype, np.dtype] | None:
    """The 64-bit dtype of an array and the 32-bit one that JAX makes of it, or None."""
    if isinstance(leaf, np.generic) or not hasattr(leaf, "dtype"):
        return None
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    given = np.dtype(leaf.dtype).newbyteorder("=")
    taken = device_dtype(given)
    return None if taken == given else (given, taken)


OPTIONS = frozenset(
    {
        *("out", "executor", "max_in_flight", "progress", "retries", "checkpoint"),
        *("scratch", "task", "values"),
    }
)
"""What a plan's own methods take by name."""


def by_position(
    fun: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> Callable[..., PyTree]:
    """The function with its keyword arguments as one more positional one, a dict.

    Raises:
      TypeError: the name of one is an option of a plan.
    """
    taken = sorted(OPTIONS & kwargs.keys())
    if taken:
        raise TypeError(
            f"plan cannot take the keyword argument {taken[0]!r} of the function, "
            "as a plan has an option of that name: bind it before, with "
            f"functools.partial(fun, {taken[0]}=...)"
        )
    count, names = len(args), bool(kwargs)

    def call(*given: PyTree) -> PyTree:
        return fun(*given[:count], **(given[count] if names else {}))

    trace_as(call, "plan", fun, args, kwargs)
    return call
