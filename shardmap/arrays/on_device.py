"""Programs over the arrays of one device, with uncommitted results.

The shards of an array are committed to their devices, and so are the results that
`jax.jit` computes from them, which then refuse arrays on other devices. A program that
is compiled ahead of time for a device, but for uncommitted arrays, takes committed ones
too, and its results are not committed.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from shardmap._jax.types import Value


class Operand(NamedTuple):
    """The type of an array in the signature of a program."""

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
      fun: a function that returns a list. Programs are cached by its equality.
      operands: the types of its arguments, hashable.

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

    # In a new thread no mesh is set and no trace is around.
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(make).result()

    def run(*arrays: Value) -> list[jax.Array]:
        try:
            return compiled(*arrays)
        except ValueError:
            # The program refuses host memory, unusual layouts and `jax.disable_jit`.
            return fun(*arrays)

    return run
