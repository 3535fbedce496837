"""Taps: seeing the values of a running program on the host, and printing them."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TextIO

import jax
import jax.numpy as jnp

from shardmap.map.tap_primitive import CALLBACK, TapCall, failures, tap_p


def tap(
    func: Callable[..., Any],
    x: Any,
    *,
    result: Any = None,
    with_device: bool = False,
) -> Any:
    """Calls a host function with a value of a running program.

    Inside a map ``func`` is called once on each device, with that device's instance of
    ``x``; in a plain `jax.jit`, once with the whole value; outside both, at once.
    Calls of one device come in program order, also when nothing else uses the value.
    Between devices there is no order, and ``func`` is called from several threads.

    * Where a device computes several elements of a map, there is one call for each.
    * Inside `jax.vmap` one call has all elements: the leaves that differ have a new
      leading axis, and both branches of a `jax.lax.cond` are called if its predicate
      is one of the things that differ.
    * In maps inside maps, what the outer function computes is computed, and tapped,
      on each device that one of its elements has.
    * Differentiation taps the values of the function, once, and no derivatives. A
      custom rule's own taps are called in addition.

    Args:
      func: called as ``func(value)``, with a pytree like ``x`` of NumPy arrays of its
        own. It must not call JAX. If it raises, the program goes on, the exception is
        logged, and `taps_barrier` raises it; outside a program, ``tap`` does.
      x: a pytree of arrays. Random keys are given as `jax.random.key_data`.
      result: what to return instead of ``x``. Default: ``x``.
      with_device: whether to call ``func(value, device)``, with the `jax.Device` that
        the value is on.

    Returns:
      ``x`` or ``result``, unchanged.

    Raises:
      TypeError: ``func`` is not callable, or a leaf of ``x`` is no array.
      RuntimeError: outside a program, if ``func`` raises.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> seen = {}
      >>> def note(value, device):
      ...     seen[device.id] = float(value)
      >>> @sm.spmap
      ... def square(x):
      ...     return sm.tap(note, x, with_device=True) ** 2
      >>> square(np.arange(3.0))
      Array([0., 1., 4.], dtype=float32)
      >>> sm.taps_barrier()
      >>> sorted(seen.items())
      [(0, 0.0), (1, 1.0), (2, 2.0)]
    """
    if not callable(func):
        raise TypeError(f"tap expects a callable, but got {func!r}.")
    leaves, tree = jax.tree.flatten(x)
    tap_p.bind(
        *map(_plain, leaves), call=TapCall(func, with_device, tree), callback=CALLBACK
    )
    return x if result is None else result


def _plain(leaf: Any) -> Any:
    """``leaf`` as NumPy can hold it."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


@dataclasses.dataclass(frozen=True)
class _Print:
    fmt: str
    with_device: bool
    file: TextIO | None

    __name__ = "tap_print"

    def __call__(self, value: Any, device: jax.Device) -> None:
        text = self.fmt.format(value)
        if self.with_device:
            text = f"{device}: {text}"
        # One call, so that the lines of several devices stay whole.
        (self.file or sys.stdout).write(text + "\n")


def tap_print(
    x: Any,
    fmt: str = "{}",
    *,
    result: Any = None,
    with_device: bool = False,
    file: TextIO | None = None,
) -> Any:
    """Prints a value of a running program, a line for each call; see `tap`.

    Args:
      x: a pytree of arrays.
      fmt: where the value goes in the text, as for `str.format`.
      result: what to return instead of ``x``. Default: ``x``.
      with_device: whether the text begins with the device, such as "cpu:0: ".
      file: where to write. Default: what is `sys.stdout` at that time.

    Returns:
      ``x`` or ``result``, unchanged.

    Example:
      >>> import io, numpy as np, shardmap as sm
      >>> lines = io.StringIO()
      >>> f = sm.spmap(lambda x: sm.tap_print(x, "x is {:.1f}", file=lines))
      >>> y = f(np.array([2.5]))
      >>> sm.taps_barrier()
      >>> lines.getvalue().splitlines()
      ['x is 2.5']
    """
    printer = _Print(fmt, with_device, file)
    return tap(printer, x, result=result, with_device=True)


def taps_barrier() -> None:
    """Waits for all taps of the programs that this thread has started.

    Raises:
      RuntimeError: a tap has failed since the last time, in any thread: names the host
        function, the device and what was raised, which is the cause. The programs
        themselves went on, and their results are there.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> def check(x):
      ...     assert x >= 0, "negative"
      >>> y = sm.spmap(lambda x: sm.tap(check, x))(np.array([1.0, -2.0]))
      >>> sm.taps_barrier()
      Traceback (most recent call last):
      RuntimeError: the tap check failed on device cpu:1: AssertionError: negative
    """
    jax.effects_barrier()
    failures.raise_first()
