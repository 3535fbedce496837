"""The tap as a JAX primitive: a host function is called with the values of a program.

A tap is one equation, `tap_p`, with the tapped values as operands and no results, so
differentiation and vectorisation have little to do with it. Its lowering adds the
number of the device and calls `jax.experimental.io_callback`.

Taps of one device run in program order, which only ordered effects give: XLA runs
callbacks that do not depend on each other in any order.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

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


failures = _Failures()


@dataclasses.dataclass(frozen=True, eq=False)
class TapCall:
    """What a tap calls.

    Attributes:
      func: the host function.
      with_device: whether it is given the device behind the value.
      tree: the structure of the value.
    """

    func: Callable[..., Any]
    with_device: bool
    tree: Any

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", repr(self.func))

    def __call__(self, device: jax.Device, leaves: Sequence[Any]) -> None:
        # Copies, as the memory is the program's.
        value = jax.tree.unflatten(self.tree, map(np.array, leaves))
        if self.with_device:
            self.func(value, device)
        else:
            self.func(value)

    def in_program(self, devices: Sequence[Any], index: Any, *leaves: Any) -> tuple[()]:
        """The callback of a compiled program: never raises."""
        device = devices[int(index)]
        try:
            self(device, leaves)
        except BaseException as exception:
            failures.add(self.failed(device, exception), exception)
        return ()

    def failed(self, device: jax.Device, exception: BaseException) -> str:
        return (
            f"the tap {self.name} failed on device {device}: "
            f"{type(exception).__name__}: {exception}"
        )


# The primitive

tap_p = jex_core.Primitive("tap")
tap_p.multiple_results = True

# Every tap's equation holds this jaxpr: where there is one of its own callbacks, JAX
# tells the lowering which devices a program is for.
CALLBACK = jax.make_jaxpr(lambda: io_callback(lambda: (), (), ordered=True))().jaxpr
(_ordered_io,) = CALLBACK.effects
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


def _implementation(*leaves: Any, call: TapCall, **_: Any) -> list[Any]:
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


def _devices(context: Any, call: TapCall) -> tuple[list[Any], tuple[str, ...]]:
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
        f"the tap {call.name} is inside a shard_map over only some axes of its mesh, "
        "or inside two of them. Taps work inside one jax.shard_map over all axes of a "
        "jax.sharding.Mesh, and inside maps of shardmap at any depth."
    )


def _lowering(ctx: Any, *leaves: Any, call: TapCall, **_: Any) -> Any:
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
