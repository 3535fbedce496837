"""The tap as a JAX primitive: calls a host function with values of a program.

The operands of `tap_p` are the tapped values. With ``result_shape=``, its results are
those of the host function. Its lowering adds the number of the device and calls
`jax.experimental.io_callback`. Its effect is ordered, so taps of one device run in
program order.
"""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, Mesh

from shardmap._jax.context import (
    LoweringContext,
    devices_of,
    in_while_condition,
    manual_axes,
    mesh_around,
)
from shardmap._jax.effects import TAP_EFFECT, lower_ordered_callback
from shardmap._jax.rules import Vmap, def_batching
from shardmap._jax.types import AnyMesh, Param, PyTree, Value
from shardmap.map.primitives import explicit_sharding
from shardmap.map.primitives.axis import REPLICAS
from shardmap.units import shown


class _Failures:
    """The first failure of a tap since `taps_barrier`, and the number of later ones.

    A callback that raises spoils the results of its program on all devices, and the
    tokens that order later programs. So taps never raise; `taps_barrier` does.
    """

    def __init__(self) -> None:
        # A finalizer may tap while this thread holds it.
        self._lock = threading.RLock()
        self._first: tuple[str, BaseException] | None = None
        self._others = 0

    def add(self, message: str, exception: BaseException) -> None:
        with self._lock:
            is_first = self._first is None
            if is_first:
                self._first = message, exception
            else:
                self._others += 1
        # If one call fails, usually those of all devices do.
        if is_first:
            logging.getLogger("shardmap").error(
                "%s; taps_barrier raises this, and counts what fails until then",
                message,
                exc_info=exception,
            )
        else:
            logging.getLogger("shardmap").debug("%s", message)

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
    """The host function of a tap, and how it is called.

    Attributes:
      func: the host function.
      with_device: whether it takes the device as its second argument.
      device_index: the only device of the program that calls; None: all do.
      tree: the structure of the value.
      results: the leaves of ``result_shape``; empty without one.
      result_tree: the structure of ``result_shape``; None without one.
    """

    func: Callable[..., Any]
    with_device: bool
    device_index: int | None
    tree: Any
    results: tuple[jax.ShapeDtypeStruct, ...]
    result_tree: Any

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", None) or shown(self.func)

    def __call__(self, device: jax.Device, leaves: Sequence[Any]) -> list[np.ndarray]:
        # Copies, as the memory is the program's.
        value = jax.tree.unflatten(self.tree, map(np.array, leaves))
        returned = self.func(value, device) if self.with_device else self.func(value)
        return [] if self.result_tree is None else self._as_promised(returned)

    def _as_promised(self, returned: PyTree) -> list[np.ndarray]:
        leaves, tree = jax.tree.flatten(returned)
        if tree != self.result_tree:
            raise TypeError(f"returned {tree}, but result_shape is {self.result_tree}")
        arrays = []
        for leaf, promised in zip(map(np.asarray, leaves), self.results, strict=True):
            if leaf.shape != promised.shape or not np.can_cast(
                leaf.dtype, promised.dtype, "same_kind"
            ):
                raise TypeError(
                    f"returned {leaf.dtype}{list(leaf.shape)}, but result_shape says "
                    f"{promised.dtype}{list(promised.shape)}"
                )
            arrays.append(leaf.astype(promised.dtype))
        return arrays

    def in_program(
        self, devices: Sequence[Any], number: Value, *leaves: Value
    ) -> tuple[np.ndarray, ...]:
        """The callback of a compiled program: never raises.

        Of the program's devices, those that do not call are None.
        """
        device = devices[int(number)]
        if device is not None:
            try:
                return tuple(self(device, leaves))
            except BaseException as exception:
                failures.add(self.failed(device, exception), exception)
        return tuple(_missing(result, device is None) for result in self.results)

    def failed(self, device: jax.Device, exception: BaseException) -> str:
        return (
            f"the tap {self.name} failed on device {device}: "
            f"{type(exception).__name__}: {exception}"
        )


def _missing(result: jax.ShapeDtypeStruct, skipped: bool) -> np.ndarray:
    """The result without a call, or of one that has failed: NaN if it can be."""
    is_number = not skipped and jnp.issubdtype(result.dtype, jnp.inexact)
    return np.full(result.shape, np.nan if is_number else 0, result.dtype)


# The primitive

tap_p = jex_core.Primitive("tap")
tap_p.multiple_results = True


def _abstract_eval(
    *_: object, call: TapCall, **__: object
) -> tuple[list[Any], set[Any]]:
    results = [jax.core.ShapedArray(r.shape, r.dtype) for r in call.results]
    return results, {TAP_EFFECT}


def _implementation(*leaves: Value, call: TapCall, **_: object) -> list[Any]:
    # The programs before it come first.
    jax.effects_barrier()
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    first = arrays[0] if arrays else jnp.zeros(())
    device = first.addressable_shards[0].device
    try:
        results = call(device, arrays)
    except Exception as exception:
        raise RuntimeError(call.failed(device, exception)) from exception
    return list(map(jnp.asarray, results))


def _jvp_rule(
    primals: Sequence[Value],
    tangents: Sequence[Value],
    *,
    call: TapCall,
    **params: Param,
) -> tuple[list[Any], list[Any]]:
    if not all(isinstance(t, ad.Zero) for t in tangents) and any(
        jnp.issubdtype(result.dtype, jnp.inexact) for result in call.results
    ):
        raise NotImplementedError(
            f"the tap {call.name} returns values to a program that is differentiated, "
            "and a host function has no derivative. Put the call into a function with "
            "jax.custom_jvp or jax.custom_vjp, or jax.lax.stop_gradient around x."
        )
    results = tap_p.bind(*primals, call=call, **params)
    return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]


def _transpose_rule(_: object, *leaves: Value, **__: object) -> list[None]:
    # Reached by a tap of the input of a linear function, which has no value.
    return [None] * len(leaves)


def _batching_rule(
    vmap: Vmap,
    leaves: Sequence[Any],
    dims: Sequence[int | None],
    *,
    call: TapCall,
    **params: Param,
) -> tuple[list[Any], list[Any]]:
    if in_while_condition():
        # JAX keeps no element's value there once it has ended, as the tap is ordered.
        raise NotImplementedError(
            f"the tap {call.name} is in the condition of a while_loop under jax.vmap, "
            "which JAX vectorises wrongly. Tap in the loop's body."
        )
    if call.result_tree is None and not vmap.size:
        return [], []
    if all(dim is None for dim in dims):
        results = tap_p.bind(*leaves, call=call, **params)
        return results, [None] * len(results)
    moved = [
        leaf if dim is None else jnp.moveaxis(leaf, dim, 0)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    if call.result_tree is None:
        return tap_p.bind(*moved, call=call, **params), []

    # The host function returns the result of one element.
    explicit_sharding.check_batch("tap", leaves, dims)
    moved = list(map(explicit_sharding.drop_sharding, moved))

    def element(batched: Sequence[Any]) -> list[Any]:
        rest = iter(batched)
        each = [
            leaf if dim is None else next(rest)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        return tap_p.bind(*each, call=call, **params)

    batched = [m for m, dim in zip(moved, dims, strict=True) if dim is not None]
    results = jax.lax.map(element, batched)
    return results, [0] * len(results)


def _calling_devices(ctx: LoweringContext, call: TapCall) -> list[Any]:
    """The devices of a program in order, None for those that do not call.

    Inside `jax.shard_map` every device calls with its own value, but one replica of
    each element. Outside, one device calls with the whole value.
    """
    mesh, index = mesh_around(ctx), call.device_index
    if mesh is not None:
        _check_shard_map(ctx, call, mesh)
    devices = list(devices_of(ctx) if mesh is None else mesh.devices.flat)
    if index is not None and index >= len(devices):
        raise ValueError(
            f"the tap {call.name} has device_index={index}, but the program is for "
            f"{len(devices)} device{'s' * (len(devices) > 1)}, counted from 0."
        )
    if mesh is None:
        return [devices[index or 0]]
    callers = np.arange(len(devices)).reshape(mesh.devices.shape)
    if REPLICAS in mesh.axis_names:
        callers = callers.take(0, mesh.axis_names.index(REPLICAS))
    chosen = callers if index is None else [index]
    return [device if k in chosen else None for k, device in enumerate(devices)]


def _check_shard_map(ctx: LoweringContext, call: TapCall, mesh: AnyMesh) -> None:
    known = isinstance(mesh, Mesh) and AxisType.Manual not in mesh.axis_types
    if not known or manual_axes(ctx) != frozenset(mesh.axis_names):
        raise NotImplementedError(
            f"the tap {call.name} is inside a shard_map over only some axes of its "
            "mesh, or inside two of them. Taps work inside one jax.shard_map over all "
            "axes of a jax.sharding.Mesh, and inside maps of shardmap at any depth."
        )
    if call.device_index is not None and call.result_tree is not None:
        raise ValueError(
            f"the tap {call.name} has device_index={call.device_index} and "
            "result_shape, but in a map every device needs a result. Leave one of them "
            "out."
        )


def _lowering(
    ctx: LoweringContext, *operands: Value, call: TapCall, **_: object
) -> Any:
    devices = _calling_devices(ctx, call)
    callback = functools.partial(call.in_program, devices)
    mesh = mesh_around(ctx)

    def run(*operands: Value) -> list[Any]:
        names = () if mesh is None else mesh.axis_names
        number = jax.lax.axis_index(names) if names else np.int32(0)
        results = io_callback(callback, call.results, number, *operands, ordered=True)
        if REPLICAS in names:
            # The replicas that do not call have zeros.
            results = [jax.lax.psum(r, REPLICAS).astype(r.dtype) for r in results]
        return list(results)

    # io_callback makes JAX arrays of the values, which takes a thread of a pool. On CPU
    # all of these may be in callbacks, and it would wait forever. So the program calls
    # the host function itself.
    is_cpu = next(filter(None, devices)).platform == "cpu"
    instead = callback if is_cpu else None
    return lower_ordered_callback(ctx, TAP_EFFECT, run, operands, instead)


tap_p.def_effectful_abstract_eval(_abstract_eval)
tap_p.def_impl(_implementation)
ad.primitive_jvps[tap_p] = _jvp_rule
ad.primitive_transposes[tap_p] = _transpose_rule
def_batching(tap_p, _batching_rule)
mlir.register_lowering(tap_p, _lowering)
