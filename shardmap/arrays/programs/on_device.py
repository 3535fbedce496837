"""Small programs over the arrays of one device, whose results are free to go anywhere.

What `jax.jit` computes from arrays that are committed to a device, as the shards of an
array are, is committed to it as well and refuses to meet arrays from elsewhere. A
program that is compiled ahead, for a device but for no committed array, takes them all
the same, and its results are not committed.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from shardmap._jax.types import Value


class Operand(NamedTuple):
    """What a program knows of an array."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False


def operand(array: Value) -> Operand:
    # Arrays of keys have no weak type.
    return Operand(array.shape, array.dtype, getattr(array, "weak_type", False))


@functools.lru_cache(maxsize=1024)
def program(
    device: jax.Device, fun: Callable[..., list[Any]], operands: Sequence[Operand]
) -> Callable[..., list[jax.Array]]:
    """Compiles ``fun`` for arrays on a device.

    Args:
      device: the device.
      fun: a function that gives a list. A program is found again by this function's
        equality.
      operands: what ``fun`` is called with, hashable.

    Returns:
      A function like ``fun`` that runs as one program, on ``device``, with uncommitted
      results there. It takes arrays on ``device``, and NumPy scalars.
    """

    def make() -> Any:
        # The dtypes are those of arrays that exist, so none may be narrowed.
        with jax.default_device(device), jax.enable_x64(True):
            avals = [
                jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
                for shape, dtype, weak_type in operands
            ]
            return jax.jit(fun).lower(*avals).compile()

    # In a new thread no mesh is set and nothing is being traced.
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(make).result()

    def run(*arrays: Value) -> list[jax.Array]:
        try:
            return compiled(*arrays)
        except ValueError:
            # Not for host memory or unusual layouts, nor under `jax.disable_jit`.
            return fun(*arrays)

    return run
