"""Where results of shards are put together."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardmap.plan.keys import data_aval
from shardmap.plan.program import Value
from shardmap.plan.slices import Box, slices

COMBINE: Mapping[str, Any] = {
    "add": np.add,
    "and": np.bitwise_and,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def identity(combiner: str, dtype: Any) -> Any:
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
        return np.array(np.inf if combiner == "min" else -np.inf).astype(dtype)
    limits = np.iinfo(dtype)
    return np.array(limits.max if combiner == "min" else limits.min, dtype)


def new_buffer(value: Value, combiner: str) -> np.ndarray:
    aval = data_aval(value.aval)
    if combiner == "insert":
        return np.zeros(aval.shape, aval.dtype)
    return np.full(aval.shape, identity(combiner, aval.dtype), aval.dtype)


def put(buffer: Any, box: Box, combiner: str, part: Any) -> None:
    """Writes a shard's result into anything with ``__getitem__``, ``__setitem__``."""
    index: Any = slices(box)
    part = np.asarray(part)
    if combiner != "insert":
        part = COMBINE[combiner](np.asarray(buffer[index]), part)
    if not index and not isinstance(buffer, np.ndarray):
        index = ()
    buffer[index] = part
