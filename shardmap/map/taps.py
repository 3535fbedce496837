"""Taps: host functions that see the values of a running program.

A tap is one equation, `tap_p`, with the tapped values as operands and no results, so
differentiation and vectorisation have little to do with it. Its lowering adds the
number of the device and calls `jax.experimental.io_callback`.

Taps of one device run in program order, which only ordered effects give: XLA runs
callbacks that do not depend on each other in any order.
"""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh


class _Failures:
    """The first failure of a tap since it was last raised, and how many came after it.

    A callback that raises spoils the results of its program on all devices, and the
    tokens that order later programs. So the taps of a program never raise: what they
    would raise waits here for `taps_barrier`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[str, BaseException] | None = None
        self._others = 0

    def add(self, message: str, exception: BaseException) -> None:
        logging.error("%s", message, exc_info=exception)
        with self._lock:
            if self._first is None:
                self._first = message, exception
            else:
                self._others += 1

    def raise_first(self) -> None:
        with self._lock:
            first, others = self._first, self._others
            self._first, self._others = None, 0
        if first is not None:
            message, exception = first
            if others:
                message += f" (and {others} more calls of taps failed)"
            raise RuntimeError(message) from exception


_failures = _Failures()


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """What a tap calls: the host function, and how it wants its arguments."""

    func: Callable[..., Any]
    with_device: bool
    tree: Any

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", repr(self.func))

    def __call__(self, device: jax.Device, leaves: Sequence[Any]) -> None:
        # Copies, as the memory is the program's.
        value = jax.tree.unflatten(self.tree, map(np.array, leaves))
        self.func(value, *[device] * self.with_device)

    def in_program(self, devices: Sequence[Any], index: Any, *leaves: Any) -> tuple[()]:
        """The callback of a compiled program: never raises."""
        device = devices[int(index)]
        try:
            self(device, leaves)
        except BaseException as exception:
            _failures.add(self.failed(device, exception), exception)
        return ()

    def failed(self, device: jax.Device, exception: BaseException) -> str:
        return (
            f"the tap {self.name} failed on device {device}: "
            f"{type(exception).__name__}: {exception}"
        )


# The primitive

tap_p = jex_core.Primitive("tap")
tap_p.multiple_results = True

# Every tap's equation holds this: JAX tells the lowering which devices a program is for
# if there is one of its own callbacks somewhere.
_CALLBACK = jax.make_jaxpr(lambda: io_callback(lambda: (), (), ordered=True))().jaxpr
(_ordered_io,) = _CALLBACK.effects
(_debug,) = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().jaxpr.effects


class _TapEffect(type(_ordered_io), type(_debug)):  # type: ignore[misc]
    """Keeps taps in order, on several devices too, and is allowed everywhere.

    JAX asks for the class of an effect. The first is one that it orders on each
    device, the second one that it allows in checkpoint and in custom derivatives.
    """

    def __str__(self) -> str:
        return "Tap"


tap_effect = _TapEffect()


def is_tapped(jaxpr: Any) -> bool:
    """Whether ``jaxpr`` has a tap anywhere."""
    return tap_effect in jaxpr.effects


def _abstract_eval(*_: Any, **__: Any) -> tuple[list[Any], set[Any]]:
    return [], {tap_effect}


def _implementation(*leaves: Any, call: _Call, **_: Any) -> list[Any]:
    # The programs before it come first.
    jax.effects_barrier()
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    first = arrays[0] if arrays else jnp.zeros(())
    device = first.addressable_shards[0].device
    try:
        call(device, arrays)
    except Exception as exception:
        raise RuntimeError(call.failed(device, exception)) from exception
    return []


def _jvp_rule(primals: Any, _: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    return tap_p.bind(*primals, **params), []


def _transpose_rule(_: Any, *leaves: Any, **__: Any) -> list[None]:
    # Reached by tapping a linear function's unknown input: it has no value to show.
    return [None] * len(leaves)


def _batching_rule(
    leaves: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[Any]]:
    moved = [
        leaf if dim is None else jnp.moveaxis(leaf, dim, 0)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return tap_p.bind(*moved, **params), []


def _devices(context: Any, call: _Call) -> tuple[list[Any], tuple[str, ...]]:
    """Which devices call from this place in a program, and the mesh axes they form.

    Inside `jax.shard_map` every device calls, with its instance of the value. Outside,
    a value belongs to the program: it is whole, and the first device calls.
    """
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return list(context.device_assignment[:1]), ()
    names = mesh.axis_names
    known = isinstance(mesh, Mesh) and AxisType.Manual not in mesh.axis_types
    if known and context.manual_axes == frozenset(names):
        return list(mesh.devices.flat), names
    raise NotImplementedError(
        f"the tap {call.name} is inside a shard_map over some axes of its mesh only, or "
        "inside two of them. Taps work inside one jax.shard_map over all axes of a "
        "jax.sharding.Mesh, and inside maps of shardmap at any depth."
    )


def _lowering(ctx: Any, *leaves: Any, call: _Call, **_: Any) -> Any:
    devices, names = _devices(ctx.module_context.axis_context, call)
    callback = functools.partial(call.in_program, devices)

    def run(*leaves: Any) -> list[Any]:
        index = jax.lax.axis_index(names) if names else 0
        io_callback(callback, (), index, *leaves, ordered=True)
        return []

    token = ctx.tokens_in.get(tap_effect)
    inner = ctx.replace(tokens_in=mlir.TokenSet({_ordered_io: token}), tokens_out=None)
    results = mlir.lower_fun(run)(inner, *leaves)
    token = inner.tokens_out.get(_ordered_io)
    ctx.set_tokens_out(mlir.TokenSet({tap_effect: token}))
    if devices[0].platform == "cpu":
        # io_callback makes JAX arrays of the values first. For that it needs a thread
        # of those that are all in callbacks, if there are as many devices, and waits
        # forever. So the program calls without what io_callback puts around it.
        ctx.module_context.host_callbacks[-1] = lambda token, *values: (
            token,
            *callback(*values),
        )
    return results


tap_p.def_effectful_abstract_eval(_abstract_eval)
tap_p.def_impl(_implementation)
ad.primitive_jvps[tap_p] = _jvp_rule
ad.primitive_transposes[tap_p] = _transpose_rule
batching.primitive_batchers[tap_p] = _batching_rule
mlir.register_lowering(tap_p, _lowering)

# What users call


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

    * Inside `jax.vmap`, and where a device computes several elements of a map, one
      call has all of them: the leaves that differ have a new leading axis. Free places
      of a last block repeat its last element, and both branches of a `jax.lax.cond`
      are called if its predicate is one of the things that differ.
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
        *map(_plain, leaves), call=_Call(func, with_device, tree), callback=_CALLBACK
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
      with_device: whether the text begins with the device, such as ``cpu:0: ``.
      file: where to write. Default: what is `sys.stdout` at that time.

    Returns:
      ``x`` or ``result``, unchanged.

    Example:
      >>> import io, numpy as np, shardmap as sm
      >>> lines = io.StringIO()
      >>> f = sm.spmap(lambda x: sm.tap_print(x, "x is {:.1f}", file=lines))
      >>> y = f(np.array([2.5]))
      >>> sm.taps_barrier()
      >>> lines.getvalue()
      'x is 2.5\n'
    """
    printer = _Print(fmt, with_device, file)
    return tap(printer, x, result=result, with_device=True)


def taps_barrier() -> None:
    """Waits for all taps of the programs that this thread has started.

    Raises:
      RuntimeError: a tap has failed since the last time: names the host function, the
        device and what it raised, which is the cause. The programs themselves went on
        and their results are there.

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
    _failures.raise_first()
