"""The type of JAX's arrays, on which devices they differ, and ``with mesh:``."""

import warnings
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh

from shardmap._jax import other_jax
from shardmap._jax.types import Aval

try:
    from jax._src import config as _config
    from jax._src import mesh as _mesh

    # `jax.Array` is an interface: attributes that it is given do not reach the arrays.
    from jax._src.array import ArrayImpl as ArrayType
except ImportError as error:
    raise other_jax(
        f"shardmap.compat gives arrays the attributes that they had, but {error}"
    ) from error

__all__ = [
    "ArrayType",
    "check_types_unchecked",
    "concrete_mesh",
    "current_mesh",
    "types_unchecked",
    "varying_axes",
    "varying_like",
]


def check_types_unchecked() -> None:
    """Refuses a map inside a `jax.shard_map` with ``check_vma=True``."""
    if _config._check_vma.value:
        raise ValueError(
            "a map of shardmap is inside a jax.shard_map with check_vma=True, but no "
            "value in a map says along which mesh axes it differs. Pass "
            "check_vma=False to that jax.shard_map."
        )


def types_unchecked() -> AbstractContextManager[Any]:
    """A context as in a `jax.shard_map` with ``check_vma=False``."""
    return _config._check_vma(False)


def varying_axes(aval: Aval) -> tuple[str, ...]:
    """The varying mesh axes of a type; none with ``check_vma=False``."""
    return tuple(sorted(aval.manual_axis_type.varying))


def varying_like(value: jax.Array, like: Aval) -> jax.Array:
    """``value`` with the varying mesh axes of ``like`` too.

    All branches of a `jax.lax.cond` must have results of one type.
    """
    own = varying_axes(jax.typeof(value))
    more = tuple(axis for axis in varying_axes(like) if axis not in own)
    return jax.lax.pcast(value, more, to="varying") if more else value


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
