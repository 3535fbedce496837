"""Small programs over the arrays of one device, whose results are free to go anywhere.

What `jax.jit` computes from arrays that are committed to a device, as the shards of an
array are, is committed to it as well and refuses to meet arrays from elsewhere. A
program that is compiled ahead, for a device but for no committed array, takes them all
the same, and its results are not committed.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax

Signature: TypeAlias = tuple[tuple[tuple[int, ...], Any, bool], ...]


def run_on(
    device: jax.Device, fun: Callable[..., list[Any]], arrays: Sequence[Any]
) -> list[jax.Array]:
    """``fun(*arrays)`` as one program, on the device where the arrays are.

    Args:
      device: the device.
      fun: a function that gives a list. A program is found again by this function's
        equality.
      arrays: arrays on ``device``, and NumPy scalars.

    Returns:
      The results, on ``device``, uncommitted.
    """
    signature = tuple(
        (array.shape, array.dtype, getattr(array, "weak_type", False))
        for array in arrays
    )
    try:
        return _program(device, fun, signature)(*arrays)
    except ValueError:
        # Not for host memory or unusual layouts, nor under `jax.disable_jit`.
        return fun(*arrays)


@functools.lru_cache(maxsize=1024)
def _program(device: jax.Device, fun: Callable[..., Any], signature: Signature) -> Any:
    def compiled() -> Any:
        # The dtypes are those of arrays that exist, so none may be narrowed.
        with jax.default_device(device), jax.enable_x64(True):
            avals = [
                jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
                for shape, dtype, weak in signature
            ]
            return jax.jit(fun).lower(*avals).compile()

    # In a new thread no mesh is set and nothing is being traced.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compiled).result()
