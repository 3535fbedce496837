"""The type of JAX's arrays, and the mesh of ``with mesh:``."""

import warnings

import jax
from jax.sharding import Mesh

from shardmap._jax import other_jax

try:
    from jax._src import mesh as _mesh
    from jax._src.array import ArrayImpl as ArrayType
except ImportError as error:
    raise other_jax(
        f"shardmap.compat gives arrays the attributes that they had, but {error}"
    ) from error

__all__ = ["ArrayType", "current_mesh"]

# `jax.Array` is an interface: what it is given does not reach the arrays themselves.
# Making one to ask for its type would start a backend.
if not issubclass(ArrayType, jax.Array):
    raise other_jax("jax._src.array.ArrayImpl is not the type of JAX's arrays")
for _name in ("thread_resources", "get_concrete_mesh"):
    if not hasattr(_mesh, _name):
        raise other_jax(f"jax._src.mesh has no {_name}, which tells the mesh around")


def current_mesh() -> Mesh:
    """The mesh of ``with mesh:`` or `jax.set_mesh` around here; perhaps an empty one.

    No public name tells of ``with mesh:`` without a warning; `jax.sharding.get_mesh`
    refuses while something is traced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh = _mesh.thread_resources.env.physical_mesh
    return mesh if not mesh.empty else _mesh.get_concrete_mesh()
