"""The functions of ``jax.experimental.host_callback``, with their parameters.

    from shardmap.compat import host_callback as hcb

They call `shardmap.tap`. The ``transforms`` of a host function are always ``()``.
"""

import contextlib
import dataclasses
import enum
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax
import numpy as np

from shardmap._jax.types import PyTree, Value
from shardmap.api.taps import tap, taps_barrier

__all__ = [
    "CallbackException",
    "CallbackFlavor",
    "barrier_wait",
    "call",
    "id_print",
    "id_tap",
    "outfeed_receiver",
]


class CallbackException(RuntimeError):
    """The error of `barrier_wait` after a host function raised."""


@contextlib.contextmanager
def _as_callback_exceptions() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CallbackException(str(error)) from error.__cause__


class CallbackFlavor(enum.Enum):
    """The kinds of callback in JAX; all of them are taps here."""

    IO_CALLBACK = 1
    PURE = 2
    DEBUG = 3


def id_tap(
    tap_func: Callable[..., Any],
    arg: PyTree,
    *,
    result: PyTree = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
    **kwargs: object,
) -> PyTree:
    """Calls ``tap_func(arg, transforms)`` on the host, and returns ``arg``.

    Args:
      tap_func: the host function; with ``tap_with_device`` it also gets ``device=``.
      arg: a pytree of arrays.
      result: the value to return instead of ``arg``.
      tap_with_device: whether to pass the device.
      device_index: the device that calls if several hold the value. 0: as for
        `shardmap.tap`, where all devices of a map call.
      callback_flavor: not used.
      **kwargs: more arguments of ``tap_func``.

    Raises:
      CallbackException: the host function raised outside of a program.

    >>> id_tap(lambda x, transforms: print(x, transforms), 3)
    3 ()
    3
    """
    host = _Tap(tap_func, tap_with_device, _fixed(kwargs))
    return _tap(host, arg, device_index, result=result)


def id_print(
    arg: PyTree,
    *,
    result: PyTree = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    output_stream: TextIO | None = None,
    threshold: int | None = None,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
    **kwargs: object,
) -> PyTree:
    """Prints ``arg`` on the host, after a line with the other arguments; returns it.

    Args:
      arg: a pytree of arrays.
      result: the value to return instead of ``arg``.
      tap_with_device: whether the line has the device.
      device_index: as for `id_tap`.
      output_stream: where to write. Default: `sys.stdout` at the time of the call.
      threshold: the number of elements above which an array is shortened.
      callback_flavor: not used.
      **kwargs: values for the first line, printed as ``name: value``.

    >>> id_print((1, [2.5, 3]), what="these")
    what: these
    (1, [2.5, 3])
    (1, [2.5, 3])
    """
    host = _Print(id_print, tap_with_device, _fixed(kwargs), output_stream, threshold)
    return _tap(host, arg, device_index, result=result)


def call(
    callback_func: Callable[..., Any],
    arg: PyTree,
    *,
    result_shape: PyTree = None,
    call_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
) -> PyTree:
    """Calls ``callback_func(arg)`` on the host, and returns its result.

    Args:
      callback_func: the host function; with ``call_with_device`` it also gets
        ``device=``.
      arg: a pytree of arrays.
      result_shape: a pytree of the shapes and dtypes of the result, or of numbers.
        None: the result is None.
      call_with_device: whether to pass the device.
      device_index: as for `id_tap`.
      callback_flavor: not used.

    Raises:
      CallbackException: the host function raised outside of a program.

    >>> call(lambda x: x * 2, np.float32(3), result_shape=np.float32(0))
    Array(6., dtype=float32)
    """
    host = _Call(callback_func, call_with_device)
    if not jax.tree.leaves(result_shape):
        _tap(host, arg, device_index)
        return result_shape
    shapes = jax.tree.map(_shape_of, result_shape)
    return _tap(host, arg, device_index, result_shape=shapes)


def _shape_of(leaf: Value) -> Value:
    is_number = isinstance(leaf, bool | int | float | complex)
    return jax.typeof(leaf) if is_number else leaf


def _tap(
    host: Callable[..., PyTree], arg: PyTree, device_index: int, **results: PyTree
) -> PyTree:
    with _as_callback_exceptions():
        return tap(
            host, arg, with_device=True, device_index=device_index or None, **results
        )


def barrier_wait(logging_name: str | None = None) -> None:
    """Waits for all taps of programs that this thread has started.

    Args:
      logging_name: not used.

    Raises:
      CallbackException: a host function raised; the cause is its exception.
    """
    with _as_callback_exceptions():
        taps_barrier()


@contextlib.contextmanager
def outfeed_receiver(*_: object, **__: object) -> Iterator[None]:
    """A context that taps needed until 2020; waits for taps at its end."""
    yield
    barrier_wait()


def _fixed(kwargs: dict[str, object]) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(kwargs.items()))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A host function with keyword arguments; equal ones share a program."""

    func: Callable[..., Any]
    with_device: bool
    kwargs: tuple[tuple[str, object], ...] = ()

    @property
    def __name__(self) -> str:
        return getattr(self.func, "__name__", repr(self.func))

    def __call__(self, value: PyTree, device: jax.Device) -> PyTree:
        kwargs = dict(self.kwargs)
        if self.with_device:
            kwargs["device"] = device
        return self.call(value, kwargs)

    def call(self, value: PyTree, kwargs: dict[str, Any]) -> PyTree:
        return self.func(value, **kwargs)


class _Tap(_Call):
    """A host function that perhaps takes ``transforms``."""

    def call(self, value: PyTree, kwargs: dict[str, Any]) -> PyTree:
        # The oldest host functions take the transforms by name, or not at all.
        if _accepts(self.func, value, (), **kwargs):
            return self.func(value, (), **kwargs)
        if _accepts(self.func, value, transforms=(), **kwargs):
            return self.func(value, transforms=(), **kwargs)
        return self.func(value, **kwargs)


def _accepts(func: Callable[..., Any], *args: object, **kwargs: object) -> bool:
    try:
        inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Print(_Call):
    stream: TextIO | None = None
    threshold: int | None = None

    def call(self, value: PyTree, kwargs: dict[str, Any]) -> None:
        first = " ".join(f"{name}: {kwargs[name]}" for name in sorted(kwargs))
        lines = [first] if kwargs else []
        with np.printoptions(threshold=self.threshold or 1024):
            numbers = jax.tree.map(lambda a: a if np.ndim(a) else a.item(), value)
            lines.append(str(numbers))
        # One write, so that the output of devices is not interleaved.
        stream = self.stream or sys.stdout
        if stream is not None:  # A process may have none.
            stream.write("\n".join(lines) + "\n")
