"""`pmap` and `sharded_jit`, with their parameters in JAX."""

import functools
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardmap._jax.types import PyTree
from shardmap.api import sharded_jit as partitions
from shardmap.api.elements import UnmappedResultsDiffer
from shardmap.api.spmap import MappedFunction, spmap
from shardmap.compat.edits import caller

__all__ = ["pmap", "sharded_jit"]


def pmap(
    fun: Callable[..., PyTree],
    axis_name: Hashable = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    global_arg_shapes: PyTree = None,
) -> Any:
    """`shardmap.spmap` with the parameters of `jax.pmap`.

    If a result with ``out_axes=None`` differs between elements, `pmap` warns, and
    returns that of element 0. `shardmap.spmap` raises an error.

    Args:
      fun: the function of one element.
      axis_name: the name of the axis, as for `shardmap.spmap`.
      in_axes: the mapped axis of each argument.
      out_axes: the mapped axis of each result.
      static_broadcasted_argnums: positions of compile-time constants.
      devices: the devices to use.
      backend: the platform whose devices to use.
      axis_size: the number of elements.
      donate_argnums: positions of arguments whose memory the results may reuse.
      global_arg_shapes: not used in one process, whose arrays have these shapes.

    Raises:
      ValueError: ``global_arg_shapes`` is given in one of several processes; or as
        `shardmap.spmap`.

    >>> pmap(lambda x: x + 1)(jnp.zeros((1, 2)))
    Array([[1., 1.]], dtype=float32)
    """
    if global_arg_shapes is not None and jax.process_count() > 1:
        raise ValueError(
            f"pmap takes no global_arg_shapes over {jax.process_count()} processes. "
            "Leave it out, and make arguments that are cut across processes with "
            "jax.make_array_from_process_local_data."
        )
    options = {
        "in_axes": in_axes,
        "static_broadcasted_argnums": static_broadcasted_argnums,
        "devices": devices,
        "backend": backend,
        "axis_size": axis_size,
        "donate_argnums": donate_argnums,
    }
    mapped = spmap(fun, axis_name, out_axes=out_axes, **options)
    if None not in jax.tree.leaves(out_axes, is_leaf=_is_none):
        return mapped
    name = "pmap" if axis_name is None else axis_name
    element = _with_results_of_first(fun, name, out_axes)
    first = spmap(element, name, out_axes=out_axes, **options)
    return PmappedFunction(fun, mapped, first)


class PmappedFunction:
    """What `pmap` returns if a result has ``out_axes=None``."""

    def __init__(
        self,
        fun: Callable[..., PyTree],
        mapped: MappedFunction[..., PyTree],
        first: MappedFunction[..., PyTree],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._mapped, self._first = mapped, first
        self._file, self._line = caller()

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._ask(MappedFunction.__call__, *args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit` does."""
        return self._ask(MappedFunction.lower, *args, **kwargs)

    def trace(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Traced:
        """Traces the function for these arguments, as `jax.jit` does."""
        return self._ask(MappedFunction.trace, *args, **kwargs)

    def _ask(self, method: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> Any:
        try:
            return method(self._mapped, *args, **kwargs)
        except UnmappedResultsDiffer as error:
            result = method(self._first, *args, **kwargs)
            self._mapped = self._first
            warnings.warn_explicit(
                f"{error}\nThe result is that of element 0, as with jax.pmap. The "
                "edit: out_axes=0 instead of None, and shardmap.unreplicate(result).",
                UserWarning,
                self._file,
                self._line,
            )
            return result


def sharded_jit(
    fun: Callable[..., PyTree],
    in_parts: PyTree,
    out_parts: PyTree,
    num_partitions: int | None = None,
    local_in_parts: PyTree = None,
    local_out_parts: PyTree = None,
    local_num_partitions: int | None = None,
    static_argnums: int | Iterable[int] = (),
) -> Any:
    """`shardmap.sharded_jit` with the parameters of ``jax.interpreters.sharded_jit``.

    Args:
      fun: the function of whole arrays.
      in_parts, out_parts, num_partitions, static_argnums: as for
        `shardmap.sharded_jit`.
      local_in_parts, local_out_parts, local_num_partitions: None, or equal to those of
        all processes: arguments and results are global arrays.

    Raises:
      ValueError: the local partitions differ from those of all processes.

    Example:
      >>> import jax.numpy as jnp
      >>> from shardmap import compat
      >>> double = compat.sharded_jit(lambda x: 2 * x, (4,), (4,), local_in_parts=(4,))
      >>> double(jnp.ones(8)).shape
      (8,)
    """
    for name, local, whole in (
        ("in_parts", local_in_parts, in_parts),
        ("out_parts", local_out_parts, out_parts),
        ("num_partitions", local_num_partitions, num_partitions),
    ):
        if local is not None and local != whole:
            raise ValueError(
                f"sharded_jit local_{name} is {local}, but {name} is {whole}: a "
                "process's own part of an array is not taken. Leave it out and pass "
                "global arrays, which jax.make_array_from_process_local_data makes."
            )
    return partitions.sharded_jit(
        fun, in_parts, out_parts, num_partitions, static_argnums
    )


def _is_none(axis: object) -> bool:
    return axis is None


def _with_results_of_first(
    fun: Callable[..., PyTree], axis_name: Hashable, out_axes: PyTree
) -> Callable[..., PyTree]:
    """``fun``, with the results of element 0 for ``out_axes=None``."""

    def of_first(result: jax.Array) -> jax.Array:
        result = jnp.asarray(result)
        is_first = jax.lax.axis_index(axis_name) == 0
        shared = jnp.where(is_first, result, jnp.zeros_like(result))
        return jax.lax.psum(shared, axis_name).astype(result.dtype)

    @functools.wraps(fun)
    def element(*args: PyTree, **kwargs: PyTree) -> PyTree:
        def taken(axis: int | None, part: PyTree) -> PyTree:
            return part if axis is not None else jax.tree.map(of_first, part)

        return jax.tree.map(taken, out_axes, fun(*args, **kwargs), is_leaf=_is_none)

    return element
