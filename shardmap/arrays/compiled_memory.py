"""What a function takes of the memory of the device that it is compiled for."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.errors import is_too_large
from shardmap.sharding.mesh import default_devices


def temporary_bytes(
    function: Callable[..., Any], avals: Sequence[Any], device: jax.Device | None = None
) -> int | None:
    """The bytes that XLA takes besides arguments and results.

    None if the backend does not tell them, or the compiler refuses the function as too
    large. Without a device it is compiled for the first default one.
    """
    if device is None:
        device = next(iter(default_devices()), None)
    there = contextlib.nullcontext() if device is None else jax.default_device(device)
    with there:
        lowered = jax.jit(function).lower(*avals)
        try:
            analysis = lowered.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if not is_too_large(error):
                raise
            return None
    return None if analysis is None else int(analysis.temp_size_in_bytes)
