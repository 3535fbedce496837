"""The type of JAX's arrays, and the mesh of ``with mesh:``."""

import warnings

import jax
from jax._src import mesh as _mesh
from jax._src.array import ArrayImpl as ArrayType
from jax.sharding import Mesh

# `jax.Array` is an interface: what it is given does not reach the arrays themselves.
# Making one to ask for its type would start a backend.
if not issubclass(ArrayType, jax.Array):
    raise ImportError("jax._src.array.ArrayImpl is not the type of JAX's arrays")


def current_mesh() -> Mesh:
    """The mesh of ``with mesh:`` or `jax.set_mesh` around here; perhaps an empty one.

    No public name tells of ``with mesh:`` without a warning; `jax.sharding.get_mesh`
    refuses while something is traced.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh = _mesh.thread_resources.env.physical_mesh
    return mesh if not mesh.empty else _mesh.get_concrete_mesh()
