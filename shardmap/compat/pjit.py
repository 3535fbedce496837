"""`pjit` of ``jax.experimental.pjit``, with its parameters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import current_mesh
from shardmap._jax.types import PyTree

__all__ = ["PartitionSpec", "pjit", "with_sharding_constraint"]


_UNSPECIFIED: PyTree = object()


def pjit(
    fun: Callable[..., PyTree],
    in_axis_resources: PyTree = _UNSPECIFIED,
    out_axis_resources: PyTree = _UNSPECIFIED,
    *args: int | Sequence[int],
    **kwargs: Any,
) -> "PartitionedFunction":
    """`jax.jit` with partition specs for the surrounding mesh.

    Args:
      fun: the function.
      in_axis_resources: a pytree prefix of the tuple of arguments, with partition specs
        as leaves; None: replicated over the mesh around the call. Default: the
        shardings of the arguments.
      out_axis_resources: the same for the result. Default: XLA chooses.
      *args: further parameters of `jax.jit`: ``static_argnums``, ``donate_argnums``.
      **kwargs: the same, by name. ``in_shardings`` and ``out_shardings`` are later
        names of the first two; their leaves may be shardings too.

    >>> import numpy as np
    >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
    ...     double = pjit(lambda x: 2 * x, PartitionSpec("x"), PartitionSpec())
    ...     print(double(np.arange(3)))
    [0 2 4]
    """
    for name, value in zip(("static_argnums", "donate_argnums"), args, strict=False):
        kwargs[name] = value
    if in_axis_resources is not _UNSPECIFIED:
        kwargs["in_shardings"] = in_axis_resources
    if out_axis_resources is not _UNSPECIFIED:
        kwargs["out_shardings"] = out_axis_resources
    return PartitionedFunction(fun, kwargs)


class PartitionedFunction:
    """The result of `pjit`: a function compiled for the mesh around each call."""

    def __init__(self, fun: Callable[..., PyTree], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._options = fun, options
        self._made: dict[Mesh, jax.stages.Wrapped] = {}

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._on_mesh()(*args, **kwargs)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lowers the function for these arguments, as `jax.jit` does."""
        return self._on_mesh().lower(*args, **kwargs)

    def _on_mesh(self) -> jax.stages.Wrapped:
        mesh = current_mesh()
        if mesh not in self._made:
            shardings = {
                name: _on(mesh, value)
                for name, value in self._options.items()
                if name in ("in_shardings", "out_shardings")
            }
            self._made[mesh] = jax.jit(self._fun, **self._options | shardings)
        return self._made[mesh]


def _is_spec(spec: object) -> bool:
    return spec is None or isinstance(spec, PartitionSpec)


def _on(mesh: Mesh, specs: PyTree) -> PyTree:
    """``specs`` as shardings of a mesh, if there is one; None: replicated over it."""
    if mesh.empty:
        return specs
    return jax.tree.map(
        lambda spec: (
            NamedSharding(mesh, spec or PartitionSpec()) if _is_spec(spec) else spec
        ),
        specs,
        is_leaf=_is_spec,
    )
