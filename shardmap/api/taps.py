"""Taps: seeing the values of a running program on the host, and printing them."""

import dataclasses
import operator
import sys
from collections.abc import Callable
from typing import Any, TextIO

import jax
import jax.numpy as jnp

from shardmap._jax.effects import CALLBACK_JAXPR
from shardmap.arrays.array_likes import typeof
from shardmap.map.primitives.tap import TapCall, failures, tap_p
from shardmap.units import shown


def tap(
    func: Callable[..., Any],
    x: Any,
    *,
    result: Any = None,
    result_shape: Any = None,
    with_device: bool = False,
    device_index: int | None = None,
) -> Any:
    """Calls a host function with a value of a running program.

    Inside a map, ``func`` is called for each element, with the value on the element's
    device. In a plain `jax.jit`, it is called once with the whole value. Outside of
    both, it is called immediately. The calls of one device are in program order, also
    if nothing else uses the value. Calls of different devices have no order, and come
    from several threads.

    * Inside `jax.vmap`, one call gets all elements: leaves that differ have a new
      leading axis.
    * If vectorised elements take different branches of a `jax.lax.cond`, all elements
      call in each branch. In the body of a `jax.lax.while_loop`, all elements call
      until the last one has left. A tap in the condition of such a loop raises an
      error.
    * In nested maps, a tap of the outer function is called on each device of its
      element.
    * Differentiation calls the tap with the primal values once, and not with
      derivatives; in a `jax.lax.while_loop` twice. Taps in a custom rule are called
      too.
    * With ``lowering="spmd"``, the first device of the program calls for all elements.

    Args:
      func: called as ``func(value)``, with a pytree like ``x`` of NumPy arrays. It must
        not call JAX. If it raises, the program goes on, the exception is logged, and
        `taps_barrier` raises it; outside of a program, ``tap`` raises it.
      x: a pytree of arrays. Random keys are passed as `jax.random.key_data`.
      result: the value to return instead of ``x``. Default: ``x``.
      result_shape: the shapes of what ``func`` returns, as a pytree of
        `jax.ShapeDtypeStruct`, to return its value to the program. Inside `jax.vmap`,
        ``func`` is then called for each element. If ``func`` raises, the value is NaN,
        or zero. It has no derivative.
      with_device: whether to call ``func(value, device)``, with the `jax.Device` of the
        value.
      device_index: call only for this device, an index into the program's devices.
        Outside a map, this device instead of the first one calls with the whole value.
        Ignored outside of a program.

    Returns:
      ``x`` or ``result``, unchanged; with ``result_shape``, what ``func`` returned.

    Raises:
      TypeError: ``func`` is not callable, a leaf of ``x`` is not an array, or a leaf of
        ``result_shape`` has no shape and dtype.
      ValueError: ``result`` and ``result_shape`` are both given; ``device_index`` is
        not a device of the program, or is given with ``result_shape`` in a map.
      NotImplementedError: what ``func`` returned would have to be differentiated, or
        the tap is in the condition of a vectorised `jax.lax.while_loop`.
      RuntimeError: ``func`` raised outside of a program.

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

      A value comes back with ``result_shape``:

      >>> def weigh(value, device):
      ...     return value * 10 ** device.id
      >>> @sm.spmap
      ... def weighed(x):
      ...     return sm.tap(weigh, x, result_shape=x, with_device=True)
      >>> weighed(np.ones(3, np.float32))
      Array([  1.,  10., 100.], dtype=float32)
    """
    if not callable(func):
        raise TypeError(f"tap expects a callable, but got {shown(func)}.")
    if device_index is not None and operator.index(device_index) < 0:
        raise ValueError(f"tap expects a device_index from 0 on, got {device_index}.")
    promised: list[Any] = []
    result_tree = None
    if result_shape is not None:
        if result is not None:
            raise ValueError(
                "tap got result and result_shape: it returns either what it is given "
                "or what the function returns."
            )
        promised, result_tree = jax.tree.flatten(result_shape)
    _check_arrays("tap_print" if isinstance(func, _Print) else "tap", x)
    leaves, tree = jax.tree.flatten(x)
    call = TapCall(
        func,
        with_device,
        device_index,
        tree,
        tuple(map(_promised, promised)),
        result_tree,
    )
    returned = tap_p.bind(*map(_plain, leaves), call=call, callback=CALLBACK_JAXPR)
    if result_tree is not None:
        return jax.tree.unflatten(result_tree, returned)
    return x if result is None else result


def _check_arrays(caller: str, x: Any) -> None:
    """Refuses what a program cannot hold."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        try:
            typeof(leaf)
        except TypeError:
            raise TypeError(
                f"{caller} takes arrays, but x{jax.tree_util.keystr(path)} is "
                f"{shown(leaf)} of type {type(leaf).__name__}. Leave it out of x; a "
                "text can stand in fmt of tap_print."
            ) from None


def _promised(leaf: Any) -> jax.ShapeDtypeStruct:
    """What `jax.jit` makes of an array like a leaf of ``result_shape``."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(
            "tap expects a result_shape whose leaves have a shape and a dtype, such as "
            f"jax.ShapeDtypeStruct, but one is {shown(leaf)}."
        )
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(
            f"tap cannot return {dtype} from the host. Return the data of keys, and "
            "use jax.random.wrap_key_data."
        )
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


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
        file = self.file or sys.stdout
        if file is not None:  # As for `print`, in a process without one.
            file.write(text + "\n")


def tap_print(
    x: Any,
    fmt: str = "{}",
    *,
    result: Any = None,
    with_device: bool = False,
    device_index: int | None = None,
    file: TextIO | None = None,
) -> Any:
    """Prints a value of a running program, one line for each call; see `tap`.

    Args:
      x: a pytree of arrays.
      fmt: a format string for the value, as for `str.format`.
      result: the value to return instead of ``x``. Default: ``x``.
      with_device: whether the line begins with the device, such as "cpu:0: ".
      device_index: print for this device only; see `tap`.
      file: where to write. Default: `sys.stdout` at the time of the call.

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
    return tap(printer, x, result=result, with_device=True, device_index=device_index)


def taps_barrier() -> None:
    """Waits for all taps of programs that this thread has started.

    Raises:
      RuntimeError: a tap of any thread has failed since the last call. The message
        names the host function and the device; the cause is the exception. The program
        itself went on, and its results are valid.

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
