"""Running compiled programs over several devices, without a hang.

On CPU, jaxlib runs the devices' parts of a program on the threads of one pool, and a
collective keeps its thread until all devices have come to it. Two things can then make
every thread wait for one that has none, and never end:

* jaxlib's concurrency-optimised scheduler, which starts several collectives of one
  program at a time; it is switched off;
* several runs in flight, as JAX does not wait for one before it starts the next; runs
  with collectives take turns.

`jax.jit` and `jax.pmap` themselves hang so on a busy machine.
"""

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from shardmap._jax.stages import is_lost_connection
from shardmap._jax.types import Param, Value
from shardmap.arrays import processes

# A program that is being traced may run others.
_turn = threading.RLock()


def map_jit(
    fun: Callable[..., Any],
    devices: Collection[jax.Device],
    communicates: bool,
    **options: Param,
) -> Any:
    """`jax.jit` for a program over several devices.

    Args:
      fun: as for `jax.jit`.
      devices: the devices.
      communicates: whether anything goes between devices.
      **options: as for `jax.jit`.

    Returns:
      What `jax.jit` returns, or a function with its ``lower`` and ``trace`` whose runs
      take turns.
    """
    if next(iter(devices)).platform != "cpu":
        return jax.jit(fun, **options)
    options["compiler_options"] = {
        "xla_cpu_enable_concurrency_optimized_scheduler": False
    }
    jitted = jax.jit(fun, **options)
    return _taking_turns(jitted) if communicates and len(devices) > 1 else jitted


def run_and_convert(
    program: Any,
    convert: Callable[[Any], Any],
    args: Sequence[Value],
    kwargs: Mapping[str, Value],
) -> Any:
    """What ``convert`` makes of a program's results, while the program may still run.

    Args:
      program: what `map_jit` gave.
      convert: a function of the results, which need not be there yet.
      args, kwargs: the program's.
    """
    if hasattr(program, "and_convert"):
        return program.and_convert(convert, *args, **kwargs)
    return convert(program(*args, **kwargs))


def _taking_turns(jitted: Any) -> Any:
    def and_convert(
        convert: Callable[[Any], Any], *args: Value, **kwargs: Value
    ) -> Any:
        with _turn:
            try:
                return jax.block_until_ready(convert(jitted(*args, **kwargs)))
            except (RuntimeError, ValueError) as error:
                if is_lost_connection(error):
                    raise RuntimeError(processes.gone(jitted.__name__)) from error
                raise

    run: Any = functools.partial(and_convert, lambda results: results)
    functools.update_wrapper(run, jitted)
    run.lower, run.trace, run.and_convert = jitted.lower, jitted.trace, and_convert
    return run
