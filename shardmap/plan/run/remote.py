"""What travels to other processes: exported functions and NumPy arrays.

No object of JAX is pickled. A worker keeps the functions that it has seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from shardmap.plan.engine.keys import data_aval
from shardmap.plan.engine.recipe import Recipe
from shardmap.plan.engine.slices import shape_of
from shardmap.plan.run.buffers import start_dtype

MOST_KEPT = 256


def exported(function: jax.stages.Wrapped, args: Sequence[Any]) -> bytes:
    """A compiled function as bytes, for arguments like these.

    Raises:
      ImportError: the package that writes them is not installed.
    """
    avals = [jax.ShapeDtypeStruct(np.shape(arg), arg.dtype) for arg in args]
    try:
        return bytes(export.export(function)(*avals).serialize())
    except ImportError as error:
        raise ImportError(
            "shards travel to other processes as jax.export bytes, which need the "
            "package flatbuffers: pip install flatbuffers"
        ) from error


def arg_avals(recipe: Recipe) -> list[jax.ShapeDtypeStruct]:
    """What a shard's function takes: boxes as they are stored, and starts."""
    found = []
    for value, box in recipe.reads:
        aval = data_aval(value.aval)
        shape = shape_of(box) + tuple(aval.shape[len(box) :])
        found.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    starts = recipe.starts
    return [*found, jax.ShapeDtypeStruct((len(starts),), start_dtype(starts))]


@functools.lru_cache(maxsize=MOST_KEPT)
def _imported(blob: bytes) -> Callable[..., Any]:
    return jax.jit(export.deserialize(bytearray(blob)).call)


def run_exported(blob: bytes, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Runs an exported function. This is what a worker is asked to do."""
    with jax.enable_x64(True):  # The types are those of the function, whatever is set.
        return [np.asarray(result) for result in _imported(blob)(*args)]
