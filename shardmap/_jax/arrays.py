"""The type of JAX's arrays, on which devices they differ, and ``with mesh:``."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax import other_jax
from shardmap._jax.types import Aval, Value, without_sharding

try:
    from jax._src import config as _config
    from jax._src import mesh as _mesh
    from jax._src.array import ArrayImpl as ArrayType
except ImportError as error:
    raise other_jax(
        f"shardmap.compat gives arrays the attributes that they had, but {error}"
    ) from error

__all__ = [
    "ArrayType",
    "are_types_checked",
    "concrete_mesh",
    "current_mesh",
    "types_unchecked",
    "varying_along",
    "varying_axes",
    "varying_like",
    "with_varying_axes",
    "without_varying_axes",
]

# `jax.Array` is an interface: what it is given does not reach the arrays themselves.
# Making one to ask for its type would start a backend.
if not issubclass(ArrayType, jax.Array):
    raise other_jax("jax._src.array.ArrayImpl is not the type of JAX's arrays")
for _name in ("thread_resources", "get_concrete_mesh"):
    if not hasattr(_mesh, _name):
        raise other_jax(f"jax._src.mesh has no {_name}, which tells the mesh around")
if not hasattr(jax.core.ShapedArray((), np.dtype(bool)), "manual_axis_type"):
    raise other_jax("avals have no manual_axis_type, which tells where arrays differ")
if not hasattr(_config, "_check_vma"):
    raise other_jax("there is no _check_vma, which tells whether avals tell that")


def are_types_checked() -> bool:
    """Whether this is traced in a `jax.shard_map` with ``check_vma=True``."""
    return bool(_config._check_vma.value)


def types_unchecked() -> AbstractContextManager[Any]:
    """Where this is entered, values do not say along which axes they differ.

    It is as in a `jax.shard_map` with ``check_vma=False``, which cannot be said inside.
    """
    return _config._check_vma(False)


def varying_axes(aval: Aval) -> tuple[str, ...]:
    """The axes of a `jax.shard_map` along which an array is said to differ.

    There are none in one with ``check_vma=False``.
    """
    return tuple(sorted(aval.manual_axis_type.varying))


def varying_like(value: jax.Array, like: Aval) -> jax.Array:
    """``value``, said to differ along the axes of a `jax.shard_map` that ``like`` does.

    The results of all branches of `jax.lax.cond` have to be of one type, and say so.
    """
    return varying_along(value, varying_axes(like))


def varying_along(value: Value, axes: Sequence[str]) -> Any:
    """``value``, said to differ along these axes, too."""
    own = varying_axes(jax.typeof(value))
    more = tuple(axis for axis in axes if axis not in own)
    return jax.lax.pcast(value, more, to="varying") if more else value


def with_varying_axes(aval: Aval, like: Aval | None = None) -> Aval:
    """``aval`` of a value that is said to differ where ``like`` does, if it does."""
    if like is None or not varying_axes(like):
        return aval
    mesh = like.sharding.mesh
    return aval.update(
        sharding=NamedSharding(mesh, PartitionSpec(*(None,) * aval.ndim)),
        manual_axis_type=like.manual_axis_type,
    )


def without_varying_axes(aval: Aval) -> Aval:
    """The same that does not say along which axes it differs."""
    is_array = isinstance(aval, jax.core.ShapedArray)  # And no token.
    return without_sharding(aval) if is_array and varying_axes(aval) else aval


def current_mesh() -> Mesh:
    """The mesh of ``with mesh:`` or `jax.set_mesh` around here; perhaps an empty one.

    No public name tells of ``with mesh:`` without a warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh = _mesh.thread_resources.env.physical_mesh
    return mesh if not mesh.empty else concrete_mesh()


def concrete_mesh() -> Mesh:
    """The mesh of `jax.set_mesh` around here; perhaps an empty one.

    `jax.sharding.get_mesh` refuses while something is traced, and where a `jax.vmap`
    has a name.
    """
    return _mesh.get_concrete_mesh()
